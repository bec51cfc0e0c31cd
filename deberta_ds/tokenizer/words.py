"""Which ids start a word: a property of the id alone, so that a table of booleans carries it.

An id starts a word if its piece begins with

- white space: the space mark U+2581 of SentencePiece and Metaspace, the byte 0x20 of byte-level
  BPE, a line end, a tab; in WordPiece whatever lacks the prefix "##", or
- a character of punctuation or a symbol (categories P and S, but not "_"), or
- a character of a script written without spaces (Han, Kana, Thai, Lao, Khmer, Myanmar, Tibetan):
  there every piece is a word of its own, also behind "##", or
- the first bytes of a character that the piece does not hold whole, if most characters that begin
  with them start a word by the rules above.

Special ids and tokens added to the vocabulary start a word too. A combining mark never does; nor
does a piece that begins inside a character; digits continue a word.
"""

import re
import unicodedata
from functools import cache

SPACE_MARK = "\u2581"
UNSPACED_SCRIPTS = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x0F00, 0x0FFF),  # Tibetan
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),  # Katakana extensions
    (0x3400, 0x4DBF),  # Han extension A
    (0x4E00, 0x9FFF),  # Han
    (0xF900, 0xFAFF),  # Han compatibility
    (0x20000, 0x323AF),  # Han extensions B and later
)


def subword_starts_word(piece: str) -> bool:
    """Return whether a piece of a tokenizer with the space mark starts a word."""
    data = byte_of(piece)
    if data is not None:
        return bytes_start_word(data)
    return piece[:1] in ("", SPACE_MARK) or character_starts_word(piece[0])


def bytes_start_word(data: bytes) -> bool:
    """Return whether a piece that stands for these bytes of UTF-8 starts a word."""
    if not data:
        return True
    length = character_length(data[0])
    if len(data) < length:
        return _most_start_words(data)
    try:
        return bool(length) and character_starts_word(data[:length].decode())
    except UnicodeDecodeError:  # bytes that no text holds
        return False


def character_starts_word(character: str) -> bool:
    """Return whether a piece that begins with this character starts a word."""
    category = unicodedata.category(character)
    if category[0] == "M":
        return False
    if character.isspace() or (category[0] in "PS" and character != "_"):
        return True
    return is_unspaced(character)


def is_unspaced(character: str) -> bool:
    """Return whether a character is of a script that is written without spaces."""
    code = ord(character)
    return (any(low <= code <= high for low, high in UNSPACED_SCRIPTS)
            and unicodedata.category(character)[0] != "M")


@cache
def _most_start_words(first_bytes: bytes) -> bool:
    """Return whether most characters with these first bytes, which lack some, start a word."""
    length = character_length(first_bytes[0])
    code = first_bytes[0] & (0x7F >> length)
    for byte in first_bytes[1:]:
        code = code << 6 | byte & 0x3F
    bits = 6 * (length - len(first_bytes))
    smallest = (0, 0, 0x80, 0x800, 0x10000)[length]
    codes = range(max(code << bits, smallest), min((code + 1) << bits, 0x110000))
    known = [character for character in map(chr, codes)
             if unicodedata.category(character) not in ("Cn", "Co", "Cs")]
    return 2 * sum(map(character_starts_word, known)) > len(known)


def character_length(first_byte: int) -> int:
    """Return the bytes of a UTF-8 character by its first; 0 for one that is no first byte."""
    if first_byte < 0x80:
        return 1
    return 0 if first_byte < 0xC2 or first_byte > 0xF4 else 2 + (first_byte >= 0xE0) + (
        first_byte >= 0xF0)


def starts_official_word(piece: str) -> bool:
    """Return whether a piece starts a word by microsoft/DeBERTa's `part_of_whole_word`.

    There a piece continues a word unless it begins with the space mark or is one character of
    punctuation, white space or control: several marks in one piece ("..."), symbols, byte pieces
    and all Han characters continue the word before them.
    """
    if len(piece) != 1 or piece == SPACE_MARK:
        return piece.startswith(SPACE_MARK)
    # All of ASCII but letters and digits counts as punctuation there.
    ascii_mark = piece.isascii() and piece.isprintable() and not piece.isalnum()
    category = unicodedata.category(piece)
    return ascii_mark or category[0] in "PC" or category == "Zs"


def byte_of(piece: str) -> bytes | None:
    """Return the byte that a piece such as <0xE4> stands for; None for any other piece."""
    found = re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
    return bytes.fromhex(found[1]) if found else None


@cache
def byte_of_character() -> dict[str, int]:
    """Return {character: byte}: how byte-level BPE writes bytes (GPT-2, `bytes_to_unicode`).

    Printable Latin-1 stands for itself; the others take U+0100 and up, in their order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)}


def bytes_of_subword(piece: str) -> bytes | None:
    """Return the bytes that a piece of byte-level BPE stands for; None if it is none."""
    table = byte_of_character()
    try:
        return bytes(table[character] for character in piece)
    except KeyError:
        return None
