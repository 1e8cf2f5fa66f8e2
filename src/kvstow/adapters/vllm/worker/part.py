"""What a rank is made of: parts with the same verbs, called in every step of the engine."""

from kvstow.adapters.vllm.protocol import StepOrders, StepResults


class RankPart:
    """Something that a rank does for its scheduler's side. A verb does nothing unless a part
    says otherwise."""

    def begin(self, step: StepOrders) -> None:
        """Do what cannot wait for the engine to start its computation."""

    def load(self, step: StepOrders) -> None:
        """Start what writes to blocks that nothing else uses, or asks for something. An
        accelerator has been given the step's computation by now."""

    def save(self, step: StepOrders) -> None:
        """Start to store what the scheduler's side has decided, after the engine's computation."""

    def has_news(self) -> bool:
        """Whether a request that waits can be told something."""
        return False

    def report(self, results: StepResults) -> None:
        """Add what has ended since the last time."""

    def close(self) -> None:
        """Let go of everything."""
