"""What `accelerate launch` is given: accelerate launch scripts/train.py CONFIG [key=value ...] [--resume]"""

import sys

from flowrl.cli import app

app(["train", *sys.argv[1:]])
