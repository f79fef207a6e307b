"""The same Trainer script with CommHookCallback, the hook named by the environment."""

from trainer_loop import main

from accel_commhooks.trainer import CommHookCallback

if __name__ == "__main__":
    main([CommHookCallback()])
