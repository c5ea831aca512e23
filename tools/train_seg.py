"""Trains a network for calibrated segmentation or classification.

python tools/train_seg.py --loss fl+mdca                              embedded scenes, any machine
python tools/train_seg.py --config configs/digits.yaml --loss fl+mdca digits: under a minute
python tools/train_seg.py --config configs/voc2012_deeplabv3plus_xception65.yaml --loss fl+mdca
python tools/train_seg.py --config configs/cifar10_resnet32.yaml --loss fl+mdca --beta 1 --gamma 3
python tools/train_seg.py --out runs/NAME --resume                    continue after any stop
torchrun --nproc-per-node 8 tools/train_seg.py …                      the same on 8 GPUs
python tools/train_seg.py --help                                      every option
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installation
    from segcal.cli import main

    sys.exit(main(command="train", prog=f"python {sys.argv[0]}"))
