"""`import flowrl` is cheap: it loads none of the libraries that take seconds."""

import json
import subprocess
import sys

HEAVY = {"accelerate", "diffusers", "peft", "tensorboard", "torch", "transformers", "triton", "wandb"}
PROBE = """
import json, sys, time
start = time.perf_counter()
import flowrl
print(json.dumps({"seconds": time.perf_counter() - start, "modules": sorted(sys.modules)}))
"""


def test_import_is_light():
    answer = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout
    seen = json.loads(answer)
    assert not HEAVY & set(seen["modules"])
    assert seen["seconds"] < 3
