"""Awkward files of pairs and awkward pictures: what expect.json and its README say of each.

FLOWRL_CASES names another folder of the same layout.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.pairs import read_pairs
from flowrl.pictures import Unfit
from flowrl.prompt_files import PromptFileError

CASES = Path(os.environ.get("FLOWRL_CASES", Path(__file__).parents[1] / "data" / "cases"))
FILES = json.loads((CASES / "expect.json").read_bytes())["files"]
IMAGES = {Path(row["file"]).name: row for row in FILES if row["kind"] == "images"}
OUTCOMES = {name: row["outcome"] for name, row in IMAGES.items()}
CHOICES = {  # where either outcome is right, ours
    "float32.tif": "numbers of no stated range (mode F)",
    "big_100mp.png": "too large: Image size (108000000 pixels) exceeds limit of 89478485 pixels",
    "text_chunk_bomb.png": "damaged: 'Decompressed data too large",
    "size_1x1.png": "1 x 1 pixels, at least 16 a side are wanted",
    "size_2x2.png": "2 x 2 pixels, at least 16 a side are wanted",
    "size_2000x3.png": "2000 x 3 pixels, at least 16 a side are wanted",
    "ok.avif": "no picture of a kind that is read (PNG, JPEG",
    "icc_swapped.png": "",
    "icc_wide.jpg": "",
}
REASONS = {
    "truncated.jpg": "image file is truncated", "truncated.png": "image file is truncated",
    "crc_wrong.png": "broken", "zero_bytes.png": "the file is empty", "text_named.png": "no picture",
    "html_named.jpg": "it starts with '<'", "svg_named.png": "it starts with '<'",
    "bomb_declared.png": "too large: Image size (4225000000 pixels) exceeds limit of",
}  # fmt: skip


def error_of(path: Path) -> str:
    with pytest.raises(PromptFileError) as error:
        read_pairs(path)
    assert "\x1b" not in str(error.value)
    return str(error.value)


def faults(told: str) -> dict[int, str]:
    """{line: its fault}."""
    return {int(n): fault for n, fault in re.findall(r"^  (?:line|row) (\d+): (.*)$", told, re.MULTILINE)}


def paired(folder: Path, names: list[Any]) -> Path:
    """A file that has each picture chosen over an ordinary one, a line each."""
    other = {"ok_b.png": "ok_a.png"}
    rows = [{"prompt": "p", "chosen": name, "rejected": other.get(str(name), "ok_b.png")} for name in names]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "pairs.jsonl"


@pytest.fixture
def images(tmp_path) -> Path:
    """A copy of the folder of pictures."""
    return Path(shutil.copytree(CASES / "edit/images", tmp_path / "root/images"))


# files of pairs


def test_a_file_of_pairs_with_every_fault_is_reported_at_once():
    told = error_of(CASES / "edit/pairs_offline.jsonl")
    assert list(faults(told)) == [2, 3, 5]
    assert "same picture" in faults(told)[2]
    assert "one picture only, rejected is missing" in faults(told)[3]
    assert "'images/truncated.jpg': damaged or incomplete" in faults(told)[5]
    assert "1 tie skipped: line 6" in told and "1 pair of different sizes: line 4" in told
    assert "511 x 767 (1)" in told and "cover the model's size" in told


def test_the_good_rows_of_it_are_used_where_bad_ones_are_skipped():
    file = read_pairs(CASES / "edit/pairs_offline.jsonl", skip_bad=True)
    assert [p.id for p in file.prompts] == [1, 4] == list(file.pairs)
    assert [[picture.path.name for picture in pair] for pair in file.pairs.values()] == [
        ["ok_a.png", "ok_b.png"], ["ok_a.png", "size_511x767.png"],
    ]  # fmt: skip
    assert [bad.number for bad in file.skipped] == [2, 3, 5]


def test_a_nested_record_is_read_and_another_version_of_it_named():
    assert faults(error_of(CASES / "edit/pairs_nested_v2.jsonl")) == {2: "schema_version is '3', 2 is read"}
    file = read_pairs(CASES / "edit/pairs_nested_v2.jsonl", skip_bad=True)
    (prompt,) = file.prompts
    assert prompt.text.startswith("a tin kettle") and prompt.metadata == {"annotator": "case"}
    assert [picture.path.name for picture in file.pairs[1]] == ["ok_a.png", "ok_b.png"]
    assert any("a picture to start from, which is not used: line 1" in notice for notice in file.notices)


def test_preferences_without_their_pictures_list_missing_single_and_tied():
    told = error_of(CASES / "prompts/preference_pairs.json")
    assert faults(told)[3] == "one picture only" and "1 tie skipped: row 2" in told
    for row, names in {1: ["0001.jpg", "0002.jpg"], 4: ["0006.jpg", "0007.jpg"]}.items():
        assert all(f"'{name}': there is no such file" in faults(told)[row] for name in names)


def test_preferences_with_their_pictures_give_the_best_and_the_worst(tmp_path):
    shutil.copy(CASES / "prompts/preference_pairs.json", tmp_path)
    for n in range(1, 9):
        shutil.copy(CASES / "edit/images" / ("ok_a.png" if n % 2 else "ok_b.png"), tmp_path / f"000{n}.jpg")
    file = read_pairs(tmp_path / "preference_pairs.json", skip_bad=True)
    names = {number: [picture.path.name for picture in pair] for number, pair in file.pairs.items()}
    assert names == {1: ["0001.jpg", "0002.jpg"], 4: ["0007.jpg", "0006.jpg"]}  # ranks 2, 0, 1: less is better


# pictures


def test_every_bad_picture_is_listed_by_name_in_one_report_and_no_good_one(images):
    names = list(IMAGES)
    told = faults(error_of(paired(images, names)))
    refused = {names[line - 1]: fault for line, fault in told.items()}
    wanted = {name for name, outcome in OUTCOMES.items() if outcome == "reject"}
    assert wanted <= set(refused) and not any(OUTCOMES[name] in ("accept", "accept_warn") for name in refused)
    for name, reason in {**REASONS, **{name: why for name, why in CHOICES.items() if why}}.items():
        assert repr(name) in refused[name] and reason in refused[name]
    assert set(refused) == wanted | {name for name, why in CHOICES.items() if why}


@pytest.mark.parametrize("name", [name for name, outcome in OUTCOMES.items() if outcome.startswith("accept")])
def test_a_picture_is_upright_in_rgb_on_white(images, name):
    facts = IMAGES[name]["facts"]["image"]
    picture, _ = read_pairs(paired(images, [name])).pairs[1]
    if "upright_size" in facts:
        assert picture.size == tuple(facts["upright_size"])
    pixels = picture.fitted(*picture.size)
    assert pixels.shape == (3, picture.size[1], picture.size[0]) and pixels.dtype == np.uint8

    def near(xy, rgb, tolerance):
        assert np.abs(pixels[:, xy[1], xy[0]].astype(int) - rgb).max() <= tolerance, xy

    for pixel in facts.get("pixels", ()):
        near(pixel["xy"], pixel["rgb"], pixel["tol"])
    for pixel in facts.get("rgba", ()):
        *rgb, alpha = pixel["rgba"]
        near(pixel["xy"], [alpha / 255 * c + 255 - alpha for c in rgb], 2)
    for deep, level in zip(facts.get("v16", ()), facts.get("expect8", ()), strict=True):
        near(deep["xy"], [level] * 3, 1)
    if "alpha_max" in facts:
        assert (pixels == 255).all()


def test_what_is_odd_about_a_picture_is_told(images):
    names = ["animated.gif", "animated.webp", "rgba_all_transparent.png", "la.png", "ok_a.png", "size_97x53.png"]
    told = "\n".join(read_pairs(paired(images, names)).notices)
    assert "3 frames, the first is used: 'animated.gif', 'animated.webp'" in told
    assert "transparent, put on white: 'rgba_all_transparent.png', 'la.png'" in told
    assert "blank, of one colour: 'rgba_all_transparent.png'" in told
    assert "97 x 53 (1)" in told and "1 pair of different sizes: line 6" in told


# where pictures are looked for


def test_a_path_that_is_no_picture_beside_the_file_is_refused(images):
    for outside in (images.parent / "secret.png", images.parents[1] / "secret.png"):
        shutil.copy(images / "ok_a.png", outside)
    rows = [json.loads(line) for line in (CASES / "edit/bad_paths.jsonl").read_text().splitlines()]
    names = [row["image"] if "image" in row else (row["images"] or [[]])[-1] for row in rows]
    names += ["../secret.png", str(images.parent / "secret.png"), "a\x1b[31m.png", "x" * 5000]
    told = faults(error_of(paired(images, names)))
    assert len(told) == len(names)
    outside = [fault for fault in told.values() if "outside of" in fault]
    assert len(outside) == 3 + 3, outside  # absolute, upwards, devices, and both of ours
    addresses = [fault for fault in told.values() if "an address, only files are read" in fault]
    assert len(addresses) == 3 and "\\x1b[31m.png" in told[len(names) - 1]


def test_links_are_followed_inside_the_folder_only(images):
    shutil.copy(images / "ok_a.png", images.parent / "out.png")
    links = {
        "in.png": "ok_a.png",
        "out.png": "../out.png",
        "loop.png": "loop.png",
        "away": "..",
        "null.png": "/dev/null",
    }
    for link, target in links.items():
        (images / link).symlink_to(target)
    os.mkfifo(images / "pipe.png")
    told = faults(error_of(paired(images, ["in.png", "out.png", "loop.png", "away/out.png", "null.png", "pipe.png"])))
    assert list(told) == [2, 3, 4, 5, 6]
    assert all("outside of" in told[line] for line in (2, 4, 5)) and "no regular file" in told[6]


def test_a_picture_that_changes_after_it_was_checked_is_not_used(images):
    picture, other = read_pairs(paired(images, ["ok_a.png"])).pairs[1]
    shutil.copy(images / "exif_6.jpg", picture.path)
    with pytest.raises(Unfit, match="ok_a.png' has changed since"):
        picture.fitted(64, 64)
    assert other.fitted(64, 64).shape == (3, 64, 64)
