import torch

import variants  # noqa: F401  registers the house's mechanisms

torch.set_num_threads(1)
