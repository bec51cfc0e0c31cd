"""Fine-tune and score a model on SuperGLUE or GLUE with several seeds per task.

    deepspeed launch/superglue.py --model MODEL --data superglue --seeds 5 \\
        --out OUT --config launch/runs/superglue/base.toml

This is launch/sweep.py with the tasks of a suite. For the leaderboard, then run
python launch/submit.py --run OUT --data superglue --zip superglue.zip
"""

import runpy
from pathlib import Path

from deberta_ds.base.errors import exit_cleanly

if __name__ == "__main__":
    sweep = runpy.run_path(str(Path(__file__).with_name("sweep.py")))
    exit_cleanly(lambda: sweep["main"](__doc__, is_suite=True))
