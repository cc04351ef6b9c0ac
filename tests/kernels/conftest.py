"""The kernels' tests run Triton's interpreter on the CPU; the switch is read when Triton is first imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
