"""Typed look-ups in a JSON object. Knows types and limits, not what the keys mean."""

import json
import sys
from dataclasses import dataclass

from lfm2.errors import ConfigError

REQUIRED = object()


@dataclass(frozen=True)
class Fields:
    """One object of a config.json. Each look-up takes several spellings: the first not null counts.

    A missing value without a default, a wrong type or a value out of range is a ConfigError.
    """

    values: dict
    where: str = "config.json"

    def find(self, *keys: str) -> tuple[str, object]:
        """The first of `keys` with a value and that value; the first key and None if none has."""
        for key in keys:
            if self.values.get(key) is not None:
                return key, self.values[key]
        return keys[0], None

    def whole(self, *keys: str, default=REQUIRED, least: int = 1, most: int = sys.maxsize) -> int:
        key, value = self.find(*keys)
        if value is None:
            return self._default(keys, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "a whole number")
        if value < least:
            raise self.wrong(key, f"{least} or more")
        if value > most:
            raise self.wrong(key, f"at most {most}")
        return value

    def positive(self, *keys: str, default=REQUIRED) -> float:
        key, value = self.find(*keys)
        if value is None:
            return self._default(keys, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number")
        if not 0 < value <= sys.float_info.max:
            raise self.wrong(key, "positive and finite")
        return float(value)

    def flag(self, *keys: str, default: bool) -> bool:
        key, value = self.find(*keys)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, *keys: str, default: str | None = None) -> str | None:
        key, value = self.find(*keys)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "text")
        return value

    def table(self, key: str) -> "Fields | None":
        """The object under `key`; None if it is null, absent or empty."""
        value = self.values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(value, f"{self.where}: {key}")

    def array(self, key: str, kind: type) -> list | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise self.wrong(key, f"a list of {'whole numbers' if kind is int else 'texts'}")
        return value

    def wrong(self, key: str, wanted: str) -> ConfigError:
        """The error that says what `key` holds and what it should be."""
        found = _short(self.values[key])
        return ConfigError(f"{self.where}: {key} is {found}; it must be {wanted}")

    def _default(self, keys: tuple[str, ...], default):
        if default is REQUIRED:
            raise ConfigError(f"{self.where} has no {' or '.join(keys)}")
        return default


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
