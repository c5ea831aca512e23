"""What the processes of tests.support.children have loaded when they start."""

import torch
import torch._dynamo  # torch's optimisers load it, which takes seconds

from segcal.data import build as build_data
from segcal.models import build as build_model
from segcal.training.config import parse_train
from tests.support.small_run import RUN

torch.set_num_threads(1)
config, _ = parse_train(RUN)
build_model(config.model, num_classes=build_data(config.data, seed=0).num_classes)
