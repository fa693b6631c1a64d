"""What the papers measured on the workloads that the examples are made after."""

# Times as fast as what they compare with, by example and system.
FIGURES: dict[str, dict[str, str]] = {
    "language_model": {
        "zen": "3.1 x all-reduce (LSTM, 16 machines)",
        "embrace": "1.18 to 2.41 x the best baseline (LM, 4 to 16 GPUs)",
    },
    "click_model": {"zen": "1.44 x OmniReduce (DeepFM, 16 machines)"},
    "translation": {
        "zen": "1.51 x OmniReduce (NMT, 16 machines)",
        "embrace": "1.09 to 1.30 x the best baseline (GNMT-8, 4 to 16 GPUs)",
    },
    "transformer_tp": {"dgc": "2.10 x all-reduce (OPT-2.7B, 16 machines)"},
    "digits_vgg": {
        "ok_topk": "1.51 to 8.83 x other sparse sums (VGG-16, 32 GPUs)",
        "spardl": "1.6 x Ok-Topk, communication alone (VGG-19, 14 workers)",
    },
    "extreme_classification": {"dragonn": "22.4 x full gradients (XML, 16 GPUs)"},
}


def line(example: str) -> str:
    """The papers' figures of an example, as one line."""
    of = FIGURES[example].items()
    return "The paper: " + "; ".join(f"{system} {figure}" for system, figure in of)
