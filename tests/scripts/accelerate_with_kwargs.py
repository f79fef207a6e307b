"""The same loop with CommHookKwargs, the hook named by the environment."""

from accelerate import Accelerator
from accelerate_loop import main

from accel_commhooks import CommHookKwargs


class MyAccelerator(Accelerator):
    """Users subclass it."""


if __name__ == "__main__":
    main(
        lambda **options: MyAccelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            kwargs_handlers=[CommHookKwargs(bucket_cap_mb=1, static_graph=False)],
            **options,
        )
    )
