from flowrl.cli import main

main()
