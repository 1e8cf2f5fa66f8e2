"""How many examples a property gets that says so itself."""

from hypothesis import settings


def examples(number: int) -> int:
    """So many; a fifth of them in `scripts/test --quick`, as for all other properties."""
    return max(1, number // 5) if settings.get_current_profile_name() == "quick" else number
