"""Put on the ranks' path: every optimizer step takes its time, so that kills leave work to do on a fast machine too."""

import os
import time

if "RANK" in os.environ and "PACE" in os.environ:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: time.sleep(float(os.environ["PACE"])))
