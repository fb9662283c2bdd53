"""Which chip: members, spellings, and what happens without one."""

from __future__ import annotations

import copy
import pickle

import pytest

import horizon_plugin_pytorch as horizon
from horizon_plugin_pytorch.errors import HorizonError, MarchNotSetError
from horizon_plugin_pytorch.march import March, as_march, get_march, require_march, set_march

MEMBERS = {
    "BERNOULLI": "bernoulli",
    "BERNOULLI2": "bernoulli2",
    "BAYES": "bayes",
    "BAYES_E": "bayes-e",
    "NASH_B": "nash-b",
    "NASH_B_LITE": "nash-b-lite",
    "NASH_B_PLUS": "nash-b-plus",
    "NASH_E": "nash-e",
    "NASH_M": "nash-m",
    "NASH_H": "nash-h",
    "NASH_P": "nash-p",
}


def test_members_are_the_documented_ones() -> None:
    assert {m.name: m.value for m in March} == MEMBERS


@pytest.mark.parametrize("name", MEMBERS)
def test_every_spelling_means_the_same_member(name: str) -> None:
    member = March[name]
    spellings = {name, name.lower(), name.title(), MEMBERS[name], MEMBERS[name].upper(), f"  {MEMBERS[name]} "}
    for spelling in spellings:
        assert as_march(spelling) is member
        set_march(spelling)
        assert get_march() is member
    for attribute in (name, name.lower(), name.title(), name.capitalize()):
        assert getattr(March, attribute) is member
    assert member == MEMBERS[name]
    assert str(member) == f"{member}" == MEMBERS[name]
    assert pickle.loads(pickle.dumps(member)) is copy.deepcopy(member) is member


def test_the_guides_spellings() -> None:
    assert March.Bayes is March.BAYES
    assert March.Bernoulli2 is March.BERNOULLI2
    assert horizon.March is March
    horizon.march.set_march(March.Bayes)
    assert horizon.get_march() is March.BAYES


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("BERNOULLI", "bernoulli"),
        ("BERNOULLI2", "bernoulli"),
        ("BAYES", "bayes"),
        ("BAYES_E", "bayes"),
        ("NASH_B_LITE", "nash"),
        ("NASH_P", "nash"),
    ],
)
def test_families(name: str, family: str) -> None:
    assert March[name].family == family


@pytest.mark.parametrize("wrong", ["baye", "", "j5", 5, None, object()])
def test_an_unknown_march_is_refused_with_the_choices(wrong) -> None:
    with pytest.raises(ValueError, match="unknown march.*bernoulli2.*nash-p"):
        as_march(wrong)
    if wrong is not None:
        before = get_march()
        with pytest.raises(ValueError, match="unknown march"):
            set_march(wrong)
        assert get_march() is before


def test_an_unknown_member_is_refused_with_the_choices() -> None:
    with pytest.raises(AttributeError, match="no member 'BAYESIAN'.*BERNOULLI2.*NASH_P"):
        _ = March.BAYESIAN
    assert not hasattr(March, "_bayes")


def test_without_a_march_the_error_says_what_to_call() -> None:
    set_march(None)
    assert get_march() is None
    with pytest.raises(MarchNotSetError, match=r"prepare_qat_fx needs.*set_march\(March\.BAYES\)") as error:
        require_march("prepare_qat_fx")
    assert isinstance(error.value, HorizonError)
    assert isinstance(error.value, RuntimeError)
    set_march("nash_e")
    assert require_march("prepare_qat_fx") is March.NASH_E


@pytest.mark.parametrize(
    ("name", "march"), [("J5", "bayes"), ("RDK X5", "bayes-e"), ("nash", "nash-e, nash-m"), ("S100", "nash-m")]
)
def test_the_name_of_a_chip_is_answered_with_its_march(name, march):
    with pytest.raises(ValueError, match=f"For {name}, that is .*{march}"):
        as_march(name)
