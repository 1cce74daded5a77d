import pytest

from hooks.valid import valid


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("<tr><th></th><th>甲</th></tr>", '<tr><td></td><th scope="col">甲</th></tr>'),
        ('<tr><th scope="row">甲</th></tr>', '<tr><th scope="row">甲</th></tr>'),
        (
            "<table>\n<thead><tr><th><code>a</code></th><th>&lt;b&gt;</th></tr></thead></table>",
            '<table tabindex="0" aria-label="表格：a、&lt;b&gt;">\n<thead><tr><th scope="col"><code>a</code></th><th scope="col">&lt;b&gt;</th></tr></thead></table>',
        ),
        ('<line x1="1" name="B"></line>', '<line x1="1"></line>'),
        ('<input name="B">', '<input name="B">'),
        ("<section data-search-exclude><p>甲</p></section>", "<div data-search-exclude><p>甲</p></div>"),
    ],
)
def test_written_and_meant(written, meant):
    assert valid(written) == meant


def test_landmarks_of_one_name_are_told_apart():
    nav, region = '<nav class="a" aria-label="目录">', '<div class="b" role="region" tabindex="0" aria-label="表">'
    assert valid(nav + region + nav + region + nav) == (
        nav + region + nav.replace("目录", "目录（2）") + region.replace("表", "表（2）") + nav.replace("目录", "目录（3）")
    )


def test_labels_of_other_elements_stay():
    button = '<button aria-label="复制"></button>'
    assert valid(button * 2) == button * 2
