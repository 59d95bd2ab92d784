"""GenEval (2310.11513, section 3) and the partial credits of Flow-GRPO, with numpy and one pass for each number.

`objects` are (class, score, box) in any order; `colour_of` names the colour of a box of a class.
"""

import numpy as np

SYNONYMS = {"mouse": "computer mouse", "keyboard": "computer keyboard", "remote": "tv remote"}


def detected(objects, name, threshold):
    """The boxes of one class, at most 16, the surest first."""
    mine = [one for one in objects if SYNONYMS.get(one[0], one[0]) == name and one[1] > threshold]
    order = np.argsort([-score for _, score, _ in mine], kind="stable")
    return [mine[i][2] for i in order[:16]]


def related(a, b, relation):
    corners = np.array([a, b], dtype=float).reshape(2, 2, 2)  # object, corner, axis
    centre = corners.mean(1)
    size = corners[:, 1] - corners[:, 0]
    offset = centre[0] - centre[1]
    shrunk = np.sign(offset) * np.maximum(np.abs(offset) - 0.1 * size.sum(0), 0)
    if not shrunk.any():
        return False
    dx, dy = shrunk / np.sqrt((offset**2).sum())
    return {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}[relation]


def met(objects, metadata, colour_of, threshold, index, surplus):
    """The objects that meet one entry of include, or None; `surplus`: whether more of them may be found."""
    want = metadata["include"][index]
    boxes = detected(objects, want["class"], threshold)
    if len(boxes) < want["count"] or (len(boxes) > want["count"] and not surplus):
        return None
    boxes = boxes[: want["count"]]
    if "color" in want and any(colour_of(box, want["class"]) != want["color"] for box in boxes):
        return None
    if "position" in want:
        relation, target = want["position"]
        others = met(objects, metadata, colour_of, threshold, target, surplus)
        if others is None or not all(related(a, b, relation) for a in boxes for b in others):
            return None
    return boxes


def strict(objects, metadata, colour_of):
    threshold = 0.9 if metadata["tag"] == "counting" else 0.3
    for index in range(len(metadata["include"])):
        if met(objects, metadata, colour_of, threshold, index, True) is None:
            return 0.0
    for bar in metadata.get("exclude", []):
        if len(detected(objects, bar["class"], threshold)) >= bar["count"]:
            return 0.0
    return 1.0


def score(objects, metadata, colour_of):
    threshold = 0.9 if metadata["tag"] == "counting" else 0.3
    credits = []
    for index, want in enumerate(metadata["include"]):
        boxes, count = detected(objects, want["class"], threshold), want["count"]
        credits.append(max(0, 1 - abs(len(boxes) - count) / count))
        if "color" in want:
            right = sum(colour_of(box, want["class"]) == want["color"] for box in boxes)
            credits.append(1 - abs(right - count) / count if len(boxes) == count else 0)
        if "position" in want:
            credits.append(0 if met(objects, metadata, colour_of, threshold, index, False) is None else 1)
    return np.mean(credits)
