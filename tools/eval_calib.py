"""Evaluate how calibrated networks are: report, diagrams, overlays and an HTML page.

python tools/eval_calib.py runs/NAME                              writes runs/NAME/eval/report.html
python tools/eval_calib.py runs/NAME runs/OTHER --out comparison  a report of each, and a comparison
python tools/eval_calib.py runs/NAME --posthoc none,ts,dc         before and after post-hoc methods
python tools/eval_calib.py runs/NAME --split holdout --overlays random --num-overlays 8
python tools/eval_calib.py --predictions DIR                      predictions saved by any framework
python tools/eval_calib.py --predictions DIR --posthoc ts --fit-predictions HOLDOUT_DIR
torchrun --nproc-per-node 8 tools/eval_calib.py …                 the same numbers, sooner
python tools/eval_calib.py --help                                 every option
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installation
    from segcal.cli import main

    sys.exit(main(command="eval", prog=f"python {sys.argv[0]}"))
