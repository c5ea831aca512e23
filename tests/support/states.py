"""States of meters, changed."""

import json

import torch


def restated(state, **changes):
    """The state of a meter with other settings (as text) or facts about it than it has."""
    about = json.loads(bytes(state["about"].tolist()))
    about["settings"] |= changes.pop("settings", {})
    text = json.dumps(about | changes)
    return {**state, "about": torch.tensor(list(text.encode()), dtype=torch.uint8)}
