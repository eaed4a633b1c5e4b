"""What a user sets, checked at once."""

from fzero.config.config import Config

__all__ = ["Config"]
