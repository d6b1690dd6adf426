from recipe.conftest import valid

__all__ = ["valid"]
