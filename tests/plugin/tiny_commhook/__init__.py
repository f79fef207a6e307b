"""A third-party hook in a package of its own: averages signs instead of gradients, and not at every step.

All that is known of it is here: its options, the step it starts at, its cycle and what it costs.
"""

from dataclasses import dataclass

from accel_commhooks import HookOptions, option, register_hook
from accel_commhooks.comm.cost import all_reduce_gradients
from accel_commhooks.hooks.base import QueueHook


@dataclass(kw_only=True)
class TinySignOptions(HookOptions):
    every: int = option(1, "Steps from one averaging to the next.", at_least=1)
    first_steps_plain: int = option(0, "Steps with plain averaging first.", at_least=0, delays_start=True)

    def cycle(self):
        return self.every


@register_hook("tiny_sign")
class TinySignHook(QueueHook):
    """Averages the signs of gradients."""

    Options = TinySignOptions

    @classmethod
    def cost(cls, options, problem):
        return all_reduce_gradients(problem) * (1 / options.every)

    def start(self, bucket):
        if self.step < self.options.first_steps_plain:
            return self.comm.all_reduce(bucket.buffer()).wait
        if self.step % self.options.every:
            return bucket.buffer().sign_
        return self.comm.all_reduce(bucket.buffer().sign_()).wait
