"""Read a JSON object field by field; every complaint names the field."""

import math
from collections.abc import Mapping
from typing import Any

from dsv32_jax.serve import errors


class Fields:
    """The fields of an object, each to be read once. A null means that the field is not there.

    Methods that read take the field's name and what stands for one that is not there; their errors name the field.
    """

    def __init__(self, raw: Any, path: str = ""):
        """Look at a value.

        Args:
            raw: The value.
            path: How errors call it; empty for a whole body.

        Raises:
            ApiError: It is no object.
        """
        if not isinstance(raw, dict):
            raise errors.invalid(path or "body", f"{path or 'the body'} must be a JSON object")
        self._left = {name: value for name, value in raw.items() if value is not None}
        self._path = path

    def name(self, field: str) -> str:
        """Return how errors call a field."""
        return f"{self._path}.{field}" if self._path else field

    def has(self, field: str) -> bool:
        """Tell whether a field is there and unread."""
        return field in self._left

    def wrong(self, field: str, rule: str) -> errors.ApiError:
        """Return the error that a field breaks a rule, such as "must be a string"."""
        return errors.invalid(self.name(field), f"{self.name(field)} {rule}")

    def any(self, field: str, default: Any = None) -> Any:
        """Return a field, whatever it is."""
        return self._left.pop(field, default)

    def boolean(self, field: str, default: bool) -> bool:
        """Return a field that must be true or false.

        Raises:
            ApiError: It is neither.
        """
        value = self.any(field, default)
        if not isinstance(value, bool):
            raise self.wrong(field, "must be true or false")
        return value

    def text(self, field: str, default: str | None = None) -> str:
        """Return a field that must be a string; without a default it must be there.

        Raises:
            ApiError: It is none, or missing.
        """
        value = self.any(field, default)
        if not isinstance(value, str):
            raise self.wrong(field, "must be a string")
        return value

    def number(self, field: str, default: float) -> float:
        """Return a field that must be a finite number.

        Raises:
            ApiError: It is none.
        """
        value = self.any(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(field, "must be a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.wrong(field, "must be finite")
        return number

    def integer(self, field: str, default: int, *, low: int, high: int) -> int:
        """Return a field that must be an integer in a range.

        Raises:
            ApiError: It is none, or outside.
        """
        value = self.any(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(field, f"must be an integer in [{low}, {high}]")
        return value

    def array(self, field: str, default: list[Any] | None = None) -> list[Any]:
        """Return a field that must be an array; without a default it must be there.

        Raises:
            ApiError: It is none, or missing.
        """
        value = self.any(field, default)
        if not isinstance(value, list):
            raise self.wrong(field, "must be an array")
        return value

    def end(self, neutral: Mapping[str, tuple[Any, ...]] | None = None) -> None:
        """Complain about a field that nobody has read.

        Args:
            neutral: Known fields that have no effect here, with the values that ask for none.

        Raises:
            ApiError: A field is unknown, or asks for what there is not.
        """
        known = neutral or {}
        for field, value in self._left.items():
            if field not in known:
                name = self.name(field)
                raise errors.ApiError(
                    400, f"unknown field {name}", param=name, code="unknown_field"
                )
            # By type too, as 1 == True.
            if not any(value == v and type(value) is type(v) for v in known[field]):
                raise errors.unsupported(self.name(field))
