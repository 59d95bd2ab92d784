"""Time and memory of attention to shared context; needs torch and flowrl_kernels alone."""

import sys

from flowrl_kernels import bench

if __name__ == "__main__":
    for case in bench.cases():
        sys.stdout.write(bench.table(bench.measure(case)) + "\n\n")
