"""Networks by name: small ones for the embedded data, DeepLabV3+ and any other of smp and timm."""

from segcal.models.build import MODELS, ModelConfig, build_model

__all__ = ["MODELS", "ModelConfig", "build_model"]
