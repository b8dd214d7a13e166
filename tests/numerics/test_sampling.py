"""Drawing tokens: by hand, and against the shares that they should have."""

import msgspec
import numpy as np
import pytest

from compare.numerics.sampling import SampleRequest, generate, next_tokens, uniform
from compare.spec.experiment import ExperimentError

REQUEST = SampleRequest(checkpoint="", prompt=[0], temperature=1.0, top_k=0)
LOGITS = np.log([[0.5, 0.2, 0.3]])


def asked(**fields) -> SampleRequest:
    return msgspec.structs.replace(REQUEST, **fields)


def test_uniform_number_chooses_a_token():
    for u, token in ((0.0, 0), (0.499, 0), (0.501, 1), (0.699, 1), (0.701, 2), (1 - 2**-53, 2)):
        assert next_tokens(LOGITS, np.array([u]), REQUEST) == [token]


def test_temperature_and_top_k():
    assert next_tokens(LOGITS, np.array([0.99]), asked(temperature=0.0)) == [0]
    assert next_tokens(LOGITS, np.array([0.99]), asked(top_k=1)) == [0]
    assert next_tokens(LOGITS, np.array([0.63]), asked(top_k=2)) == [2]  # 0.5 / 0.8 = 0.625
    assert next_tokens(LOGITS, np.array([0.62]), asked(top_k=2)) == [0]
    assert next_tokens(LOGITS, np.array([0.66]), asked(temperature=0.5)) == [1]  # 25 : 4 : 9
    for least in (1e-300, 5e-324):
        assert next_tokens(LOGITS[:, ::-1], np.array([0.5]), asked(temperature=least)) == [2]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_nan_logits_are_rejected(wrong):
    with pytest.raises(ExperimentError, match="its weights give logits that are not numbers"):
        generate(asked(tokens=2), lambda tokens: np.array([[0.0, wrong, 1.0]]), block_size=4)


def test_shares_are_met():
    drawn = next_tokens(np.tile(LOGITS, (20_000, 1)), uniform(1, 0, 20_000), REQUEST)
    np.testing.assert_allclose(np.bincount(drawn) / 20_000, [0.5, 0.2, 0.3], atol=0.01)


def test_numbers_are_those_of_the_place_alone():
    assert uniform(7, 3, 5)[:2].tolist() == uniform(7, 3, 2).tolist()
    assert not np.array_equal(uniform(7, 3, 2), uniform(7, 4, 2))
    assert not np.array_equal(uniform(8, 3, 2), uniform(7, 3, 2))


def test_model_reads_a_window_of_tokens():
    seen = []

    def logits_of(tokens_Nt):
        seen.append(tokens_Nt.tolist())
        return np.eye(4)[(tokens_Nt[:, -1] + 1) % 4] * 9

    drawn = generate(asked(prompt=[2, 3], tokens=4, temperature=0.0), logits_of, block_size=3)
    assert drawn == [[2, 3, 0, 1, 2, 3]]
    assert seen == [[[2, 3]], [[2, 3, 0]], [[3, 0, 1]], [[0, 1, 2]]]
