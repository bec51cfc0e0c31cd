"""Personal data in text: e-mail and public IP addresses, telephone, card and account numbers.

What is found is masked by a constant that stands for nobody: a name under example.com, an address
reserved for documentation (RFC 2606, RFC 5737), zeros. Card numbers must pass Luhn's check (ISO/IEC
7812-1) and account numbers the one of ISO 13616 (mod 97), so that other long numbers stay.
"""

import ipaddress
import re

# What stands beside them is looked at in ASCII: Han, Kana or Thai letters follow without a space.
_EMAIL = re.compile(r"(?<![A-Za-z0-9_.+-])[A-Za-z0-9][\w.+%-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.)+"
                    r"[A-Za-z]{2,24}(?![A-Za-z0-9_-])")
_IP = re.compile(r"(?<![A-Za-z0-9_.])(?:\d{1,3}\.){3}\d{1,3}(?![A-Za-z0-9_.]*\d)")
_PHONE = re.compile(r"(?<![A-Za-z0-9_+])\+[1-9]\d{0,2}(?:[ ().-]{0,2}\d){6,12}(?!\d)")
_CARD = re.compile(r"(?<![A-Za-z0-9_.-])\d(?:[ -]?\d){12,18}(?![A-Za-z0-9_-])")
_IBAN = re.compile(r"(?<![A-Za-z0-9_])[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?"
                   r"(?![A-Za-z0-9_])")


def find_personal(text: str, kinds: tuple[str, ...]) -> tuple[str, dict[str, int]]:
    """Return (the text with what was found masked, {kind: how many})."""
    found = {}
    for kind in kinds:
        mark, pattern, is_one, mask = _KINDS[kind]
        if mark in text:
            counter = _Masker(is_one, mask)
            text = pattern.sub(counter, text)
            if counter.count:
                found[kind] = counter.count
    return text, found


class _Masker:
    """The replacement of each match; counts those that are what they look like."""

    def __init__(self, is_one, mask: str):
        self._is_one, self._mask, self.count = is_one, mask, 0

    def __call__(self, match: re.Match) -> str:
        if match[0] == self._mask or not self._is_one(match[0]):
            return match[0]
        self.count += 1
        return self._mask


def _is_public(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False


def _is_card(text: str) -> bool:
    digits = [int(character) for character in text if character.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return len(set(digits)) > 1 and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _is_iban(text: str) -> bool:
    plain = text.replace(" ", "")
    turned = plain[4:] + plain[:4]
    return int("".join(str(int(character, 36)) for character in turned)) % 97 == 1


_KINDS = {
    "email": ("@", _EMAIL, lambda text: True, "name@example.com"),
    "ip": (".", _IP, _is_public, "192.0.2.1"),
    "iban": ("", _IBAN, _is_iban, "XX00 0000 0000 0000 0000"),
    "card": ("", _CARD, _is_card, "0000 0000 0000 0000"),
    "phone": ("+", _PHONE, lambda text: True, "+1 555 0100"),
}
