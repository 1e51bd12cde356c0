"""What is wrong with a kernel, as the simulator sees it. Programming errors: they end with a traceback."""


class SimulatorError(RuntimeError):
    """The kernel did what a GPU would not do, or leaves undefined."""


class DivergenceError(SimulatorError):
    """Threads that must arrive together at a warp or block operation did not."""


class DeadlockError(SimulatorError):
    """Every thread that has not returned waits for something that no other will do."""
