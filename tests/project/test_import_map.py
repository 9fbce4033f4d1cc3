import pytest
from import_map import import_map, layered


def arrows(**imports: str) -> dict[str, frozenset[str]]:
    return {box: frozenset(names.split()) for box, names in imports.items()}


def test_levels_follow_the_longest_way_down():
    found = layered(arrows(top="middle low", middle="low", low="", alone=""))
    assert found.levels == {"top": 3, "middle": 2, "low": 1, "alone": 1}
    assert (found.num_arrows, found.circle) == (3, ())
    assert str(found).endswith("4 boxes, 3 arrows, 3 levels, circles: none")


def test_circle_is_named():
    found = layered(arrows(a="b", b="c", c="a", d="a"))
    assert set(found.circle) == {"a", "b", "c"}
    assert found.circle[0] == found.circle[-1]
    assert found.levels == {}
    assert "circles: " + " → ".join(found.circle) in str(found)


def test_package_has_one_box_a_folder_and_no_circle():
    found = import_map()
    assert found.circle == ()
    assert found.levels["core"] == 1
    assert found.arrows["simulator"] == {"core", "serving"}
    assert {"reference", "fast", "correctness"} <= set(found.arrows)


@pytest.mark.parametrize("depth", [2, 3])
def test_deeper_maps_split_folders(depth):
    found = import_map(depth)
    assert len(found.arrows) > 50
    assert found.circle == ()
