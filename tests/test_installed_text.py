"""Text that packages install, as sentences: every format by a small file of its own."""

import gzip
import struct
import zlib

import pytest

from jmat.data.installed import TEXTS, installed_sentences, sentences
from jmat.data.man_pages import man_paragraphs
from jmat.data.r_texts import string_vectors
from tests.scripts import run

PAGE = r"""'\" t
.\" a comment
.TH LS 1 "a date"
.SH NAME
ls \- list the files of a folder
.SH DESCRIPTION
.PP
Lists \fBall\fP files,
.BR "in order" ,
and\ never \(lqhidden\(rq ones\&.
.TP
\fB\-a\fP, \fB\-\-all\fP
Shows names that begin with a dot\&.
.nf
int main() { return 0; }
.fi
.TS
a b c
.TE
This is the end.
"""


def serialised(*strings, version=3):
    """A vector of strings as R writes it."""
    held = b"X\n" + struct.pack(">iii", version, 0x040201, 0x030500)
    held += struct.pack(">i", 5) + b"UTF-8" if version == 3 else b""
    held += struct.pack(">ii", 16, len(strings))
    for each in strings:
        text = b"" if each is None else each.encode()
        held += struct.pack(">ii", 0x40009, -1 if each is None else len(text)) + text
    return held


def block(held):
    return struct.pack(">I", len(held)) + zlib.compress(held)


def test_a_manual_page_becomes_paragraphs():
    assert list(man_paragraphs(PAGE)) == [
        "ls - list the files of a folder",
        'Lists all files, in order, and never "hidden" ones.',
        "Shows names that begin with a dot.",
        "This is the end.",
    ]
    assert not list(man_paragraphs(".Dd May 1, 2020\n.Dt LS 1\nA page of mdoc.\n"))


def test_strings_of_r_are_read_and_nothing_else():
    numbers = b"X\n" + struct.pack(">iii", 2, 0, 0) + struct.pack(">ii", 13, 1) + b"\0\0\0\1"
    content = block(serialised("Chapter 1", None, "Größe")) + block(numbers)
    content += block(serialised("old", version=2))
    assert list(string_vectors(content)) == [["Chapter 1", "Größe"], ["old"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0", "ends in the middle of an object"),
        (b"\xff\xff\xff\xff", "is no book"),
        (b"\0\0\0\5hello", "not compressed by zlib"),
        (block(serialised("a"))[:-6], "another size than it says"),
        (struct.pack(">I", 3) + zlib.compress(b"x" * 9), "another size than it says"),
        (block(serialised("text")[:-2]), "does not hold what it says"),
        (block(serialised("text")[:-5] + b"\x7f" * 5), "does not hold what it says"),
    ],
)
def test_damaged_data_of_r_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        list(string_vectors(content))


def test_sentences_are_prose():
    text = (
        'He said: "The train is late today." Nobody of them had heard it, _of course_. '
        "Too short. | 12 | 34 | 56 | 78 | 90 | 12 |. No stop is at the end of this"
    )
    assert sentences(text) == [
        'He said: "The train is late today."',
        "Nobody of them had heard it, of course.",
    ]


@pytest.fixture
def root(tmp_path):
    """A folder in which small packages were unpacked."""
    files = {
        "usr/share/man/man1/ls.1.gz": gzip.compress(PAGE.encode()),
        "usr/share/man/de/man1/ls.1.gz": gzip.compress(
            ".PP\nDieser Befehl zählt alle Dateien auf.\n".encode()
        ),
        "usr/share/wordnet/data.noun": (
            b"  1 This is the licence of the file.\n"
            b'00001 04 n 01 act 0 000 | something that people do or cause; "a kind act"  \n'
        ),
        "usr/share/games/fortunes/art": (
            b"Art is long, and life is short.\n\t\t-- Someone\n%\nTo see is to know things well.\n"
        ),
        "usr/share/games/fortunes/art.dat": b"\0\1Binary files are no text to read.",
        "usr/share/dictd/gcide.dict.dz": gzip.compress(
            b"Gong \\Gong\\, n.\n   1. (Mus.) An instrument of {brass} that sounds when struck.\n"
            b"   [1913 Webster]\n"
        ),
        "usr/share/common-licenses/BSD": b"You may copy this text as often as you like.\n",
        "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb": block(
            serialised("EMMA", "", "Emma was clever,", "and she was _rich_ as well.", "", "Ah!")
        ),
    }
    for name, content in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "root/usr/share/games/fortunes/art.u8").symlink_to("art")
    return tmp_path / "root"


def test_every_text_is_read(root):
    found = {name: installed_sentences(name, root) for name in TEXTS}
    assert {name: each for name, each in found.items() if each} == {
        "novels": ["Emma was clever, and she was rich as well."],
        "glosses": ["Something that people do or cause."],
        "dictionary": ["An instrument of brass that sounds when struck."],
        "fortunes": ["Art is long, and life is short.", "To see is to know things well."],
        "licences": ["You may copy this text as often as you like."],
        "manual": [
            'Lists all files, in order, and never "hidden" ones.',
            "Shows names that begin with a dot.",
        ],
        "manual-de": ["Dieser Befehl zählt alle Dateien auf."],
    }


@pytest.mark.slow
def test_the_script_writes_what_is_there_and_names_what_is_not(root, tmp_path):
    out = tmp_path / "texts"
    given = (f"--root={root}", f"--out={out}", "--texts=novels,manual-de,manual-fr")
    printed, _ = run("installed_text", *given)
    assert (out / "novels.txt").read_text() == "Emma was clever, and she was rich as well.\n"
    assert "manual-de.txt: 1 sentences, German manual pages" in printed
    assert "not installed, with the package of each: manual-fr (manpages-fr)" in printed
    assert {path.name for path in out.iterdir() if path.suffix == ".txt"} == {
        "novels.txt",
        "manual-de.txt",
    }
    _, said = run("installed_text", f"--root={root}", f"--out={out}2", "--texts=manual-fr", code=1)
    assert f"none of these texts is installed below {root}: manual-fr (manpages-fr)" in said
    assert not (tmp_path / "texts2").exists()
    _, said = run("installed_text", "--texts=novel", f"--out={out}2", code=1)
    assert "--texts has 'novel'; choose from novels, glosses" in said
