"""PickScore on the authors' embeddings."""

from types import SimpleNamespace

import pytest
import torch

from flowrl.rewards import Media
from flowrl.types import Prompt
from flowrl_rewards import pickscore
from flowrl_rewards._towers import Towers


class Stored(Towers):
    """Embeddings by the grey level of a picture and by the number that a text is."""

    def __init__(self, fixture):
        network = SimpleNamespace(logit_scale=fixture["logit_scale_log"])
        super().__init__(network, lambda media: media.images[:, 0, 0, 0].long(), 1, torch.device("cpu"))
        self.fixture = fixture

    def tokens(self, texts, length):
        return torch.tensor([[int(text)] * length for text in texts])

    def see(self, pixels):
        return self.fixture["image_emb"][pixels]

    def read(self, tokens):
        return self.fixture["text_emb"][tokens[:, 0]]


@pytest.mark.parametrize(("name", "scale"), [("score_raw", 1.0), ("score_div26", 1 / 26)], ids=["raw", "over 26"])
def test_scores_are_the_authors(golden, assert_golden, monkeypatch, name, scale):
    fixture = golden("i_pickscore.npz")
    monkeypatch.setattr(pickscore, "HubTowers", lambda *_: Stored(fixture))
    monkeypatch.setattr(pickscore, "bicubic", lambda processor: None)
    levels = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 3, 2, 2).contiguous()
    scores = pickscore.PickScore(scale=scale)(Media(levels), [Prompt(i, str(i)) for i in range(5)])
    assert_golden(scores, fixture[name], 1e-9)
