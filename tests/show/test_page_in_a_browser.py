"""What a browser makes of the HTML report."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import Browser, browsing
from report_models import ODD, finding, inspection, large, row, twenty

from anesurgery.placement import Estimate, Inspection
from anesurgery.show.page import page

Browse = Callable[..., str]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as started:
        yield started


@pytest.fixture
def browse(browser: Browser, tmp_path: Path) -> Browse:
    """What a browser makes of a page at an address, and of a script in it."""

    def look(made: str, script: str = "", address: str = "") -> str:
        browser.size(1280)
        browser.show(made, tmp_path, address)
        browser.run(f"(async () => {{ {script} }})()")
        return browser.document()

    return look


def column(document: str, number: int) -> list[str]:
    """The texts of a column of the table of ops."""
    table = document[document.index('<table id="ops">') :]
    body = table[table.index("<tbody>") : table.index("</tbody>")]
    lines = re.findall(r'<tr(?: class="here")?>(.*?)</tr>', body, re.S)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", line, re.S) for line in lines]
    return [re.sub(r"<[^>]+>", "", c[number]) for c in cells]


def three() -> Inspection:
    """Three ops; nothing is known of the time of the second."""
    rows = [row(k, "x", "ane", estimate=None if k == 1 else Estimate(3.0 - k, 1.0)) for k in range(3)]
    return inspection(rows)


FILTERS: dict[str, list[str]] = {
    "#q=NORM": ["18"],
    "#q=dtype-int32": ["0"],
    "#unit=cpu": ["0", "19"],
    "#segment=2": ["18"],
    "#attention=1": ["0", "18", "19"],
    "#rule=dtype-int32": ["0"],
    "#type=linear": ["19"],
    "#unit=unknown": ["18"],
    "#q=nothing": [],
    "#sort=nonsense&unit=cpu": ["0", "19"],
}
"""Address of a page -> the ops that it shows."""


@pytest.mark.parametrize("name", ODD)
def test_a_browser_has_nothing_to_complain_of(name: str, browse: Browse) -> None:
    document = browse(page(ODD[name]))
    assert "<title>owned</title>" not in document
    rows = sum(len(p.ops) for p in [ODD[name], *ODD[name].parts.values()])
    assert f"{rows:,} of {rows:,} ops" in document
    assert len(column(document, 0)) == min(rows, 150)


def test_a_complaint_is_an_error(browse: Browse) -> None:
    with pytest.raises(AssertionError, match="nobody is not defined"):
        browse("<body><script>nobody()</script></body>")


def test_the_address_sorts(browse: Browse) -> None:
    document = browse(page(large()), address="#sort=flop&dir=desc")
    expected = sorted(large().ops, key=lambda r: (-r.flop, r.index))[:150]
    assert column(document, 0) == [str(r.index) for r in expected]
    assert 'aria-sort="descending"' in document


def test_what_is_not_known_sorts_last_either_way(browse: Browse) -> None:
    assert column(browse(page(three()), address="#sort=ane"), 0) == ["2", "0", "1"]
    assert column(browse(page(three()), address="#sort=ane&dir=desc"), 0) == ["0", "2", "1"]


@pytest.mark.parametrize("address", FILTERS)
def test_the_address_filters(address: str, browse: Browse) -> None:
    assert column(browse(page(twenty()), address=address), 0) == FILTERS[address]


def test_clicks_sort_and_unfold(browse: Browse) -> None:
    clicks = """
      const heads = () => [...document.querySelectorAll("#ops th button")];
      const head = (name) => heads().find((button) => button.textContent === name);
      head("work").click(); head("work").click();
      document.querySelector("#ops .more").click();
    """
    document = browse(page(twenty()), script=clicks)
    flops = [str(r.index) for r in sorted(twenty().ops, key=lambda r: (r.flop, r.index))]
    table = document[document.index('<table id="ops">') :]
    assert re.findall(r'<tr><td class="right"[^>]*>(\d+)</td>', table) == flops
    unfolded = table[table.index('class="detail"') :]
    for words in ("int32 stays on the CPU", "a table of ops", "measured", "M4", "embedding_matmul"):
        assert words in unfolded


def test_a_click_on_a_box_shows_its_ops(browse: Browse) -> None:
    document = browse(
        page(twenty()),
        script="location.hash = document.querySelectorAll('main .box')[2].querySelector('a')"
        ".getAttribute('href').slice(1);",
    )
    assert column(document, 0) == ["18"]


def test_before_and_after_are_one_click_apart(browse: Browse) -> None:
    both = page(twenty(), inspection([row(0, "conv", "ane")]))
    assert "1 of 1 ops" in browse(both)
    assert "20 of 20 ops" in browse(both, script="document.querySelector('[data-view=\"0\"]').click()")


def test_a_sort_of_two_thousand_rows_draws_only_those_in_view(browse: Browse) -> None:
    counted = """
      let drawn = 0;
      const watch = (seen) => { for (const s of seen) drawn += s.addedNodes.length; };
      new MutationObserver(watch).observe(document.querySelector("#ops tbody"), { childList: true });
      document.querySelectorAll("#ops th button")[1].click();
      await new Promise((done) => setTimeout(done));
      document.title = `drawn ${drawn}`;
    """
    drawn = re.search(r"<title>drawn (\d+)</title>", browse(page(large()), script=counted))
    assert drawn
    assert 0 < int(drawn[1]) <= 151


LONG = "a_name_without_any_place_to_break_it_" * 6
WIDTHS = (400, 800, 1280)
MEASURE = """(() => {
  document.querySelectorAll("details").forEach((d) => { d.open = true; });
  const all = (of) => [...document.querySelectorAll(of)], wide = (e) => e.getBoundingClientRect().width;
  const colour = getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number);
  return {
    width: innerWidth, over: document.documentElement.scrollWidth > innerWidth, dark: colour[0] < 60,
    narrow: all("td.why, summary .what, .evidence dd").filter((e) => wide(e) < 220).length,
    wider: all("#ops tbody tr").filter((e) => wide(e) > Math.max(innerWidth, 1000)).length,
  };
})()"""


def long_names() -> Inspection:
    """A model under a path, with names that have no place to break."""
    found = (finding(LONG, op="cast_0", message=LONG, advice="split it"),)
    rows = [row(0, "cast", "cpu", False, name=LONG, findings=found)]
    rows += [row(k, "conv", "ane", name=f"{LONG}{k}") for k in range(1, 70)]
    return inspection(rows, model=f"some/folder/{LONG}.mlpackage", notes=(LONG,))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_at_every_width_a_page_fits_and_words_have_room(scheme: str, browser: Browser, tmp_path: Path) -> None:
    for made in (page(long_names()), page(long_names(), ODD["twenty"])):
        for width in WIDTHS:
            browser.size(width, scheme=scheme)
            browser.show(made, tmp_path)
            fine = {"width": width, "over": False, "dark": scheme == "dark", "narrow": 0, "wider": 0}
            assert browser.run(MEASURE) == fine


def test_the_heading_is_the_name_of_the_file() -> None:
    made = page(inspection([row(0, "mul", "ane")], model="/some/where/net.mlpackage"))
    assert "<h1>net.mlpackage</h1>" in made
    assert "/some/where" not in made


def test_a_click_on_an_op_shows_its_row_among_the_others(browse: Browse) -> None:
    click = "location.hash = document.querySelectorAll('.box a.op')[5].getAttribute('href').slice(1);"
    document = browse(page(twenty()), script=click)
    assert len(column(document, 0)) == 20
    assert re.search(r'<tr class="here"><td[^>]*>5</td>', document)


def test_a_click_on_a_cell_shows_its_row_however_far_down(browse: Browse) -> None:
    click = """
      const run = [...document.querySelectorAll(".card.strip [data-op]")].find((g) => +g.dataset.op === 1201);
      const edge = run.getBoundingClientRect();
      run.dispatchEvent(new MouseEvent("click", { bubbles: true, clientX: edge.left + edge.width / 59 * 3.5 }));
    """
    document = browse(page(large()), click)
    assert re.search(r'<tr class="here"><td[^>]*>1204</td>', document)


def test_the_graph_zooms(browse: Browse) -> None:
    clicks = """
      const svg = document.querySelector(".card.graph svg"), wide = () => svg.getBoundingClientRect().width;
      const [out, fit, closer] = document.querySelectorAll(".zoom button");
      const sizes = [];
      for (const button of [fit, closer, closer, out, fit]) { button.click(); sizes.push(Math.round(wide())); }
      document.title = "sizes " + sizes.join(" ");
    """
    sizes = re.search(r"<title>sizes (.*?)</title>", browse(page(large()), script=clicks))
    assert sizes
    fitted, one, two, back, again = map(int, sizes[1].split())
    assert fitted < one < two
    assert abs(back - one) <= 1
    assert again == fitted
