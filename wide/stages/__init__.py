"""Training stages: router calibration, LoRA recovery, and the dial fitted after them."""
