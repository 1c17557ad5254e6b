"Pages in one file: nothing that comes from data runs, with a browser and without."
import json, re

import numpy as np, pytest
from pages import HOSTILE, complaints, opened, sticking_out
from fastrl_replay.look.html import document, escaped, image, json_text, page_path, part, section, table, tag
from fastrl_replay.steps.errors import ArgumentError

PNG = bytes.fromhex('89504e470d0a1a0a0000000d4948445200000001000000010806000000'
                    '1f15c4890000000d49444154789c6360f8cf500f00030301012de3e5d40000000049454e44ae426082')

def hostile_page():
    rows = [{h: h, 'x': h} for h in HOSTILE]
    parts = [section(h, tag('p', h, title=h, data_x=h), table([(h, h)]), table([{h: h}], caption=h)) for h in HOSTILE]
    return document(HOSTILE[0], *parts, tag('div', image(PNG, HOSTILE[1])), data=dict(rows=rows, nan=float('nan')), lead=HOSTILE[1])

def test_what_is_hostile_is_text():
    page = hostile_page()
    assert len(re.findall('<script', page)) == 2 and not re.search(r'<svg|<img(?! src="data:)|<!--', page)
    assert page.count('</script>') == 2
    for attribute in re.findall(r'<[^>]*>', page): assert not re.search(r'''\son\w+=(?!&)''', re.sub(r'"[^"]*"', '""', attribute)), attribute

def test_data_comes_back_as_it_was():
    data = {h: [h, {h: h}] for h in HOSTILE}
    assert json.loads(json_text(data)) == data and not re.search('[<>&\u2028\u2029]', json_text(data))

@pytest.mark.parametrize('x, back', [(np.float32(np.nan), 'NaN'), (np.inf, 'Infinity'), (np.array([-np.inf, 1]), ['-Infinity', 1]), (np.bool_(True), True),
    (np.int64(2**60), 2**60), (np.array([[1, 2]], np.uint8), [[1, 2]]), ((1, None), [1, None]), (np.str_('<'), '<'), (b'a', "b'a'"), (np.array('a'), 'a')])
def test_numbers_that_json_lacks_are_texts(x, back): assert json.loads(json_text(x)) == back

@pytest.mark.parametrize('name', ['page.css', 'page.js'])
def test_files_of_the_package_may_stand_in_a_page(name):
    assert not re.search(r'</(script|style)|<!--', part(name), re.I) and 'http' not in part(name)

def test_a_text_is_escaped_once(): assert escaped(escaped('&')) == '&amp;' and tag('p', escaped('<') + '>') == '<p>&lt;&gt;</p>'

def test_an_image_is_an_image():
    with pytest.raises(ArgumentError, match='a PNG'): image(b'<svg onload="x"/>')

def test_a_path_is_checked_before_there_is_a_page(tmp_path):
    assert page_path('x', tmp_path/'a.html') == tmp_path/'a.html'
    for wrong in (tmp_path, tmp_path/'none'/'a.html'):
        with pytest.raises(ArgumentError, match='x: path'): page_path('x', wrong)

@pytest.mark.browser
@pytest.mark.parametrize('scripts', [True, False])
@pytest.mark.parametrize('width, theme', [(1200, 'light'), (400, 'dark')])
def test_nothing_of_it_runs(browser, tmp_path, width, theme, scripts):
    (tmp_path/'a.html').write_text(hostile_page(), encoding='utf-8')
    opened(browser, f'file://{tmp_path}/a.html', width, theme, scripts=scripts)
    if not scripts: return
    assert browser.execute_script('return window.ran') is None and not complaints(browser) and not sticking_out(browser)
    assert browser.execute_script("return pageData().rows[0][arguments[0]]", HOSTILE[0]) == HOSTILE[0]
    assert browser.title.strip() == HOSTILE[0] and browser.execute_script("return document.images[0].naturalWidth") == 1

@pytest.mark.browser
def test_the_policy_refuses_what_gets_in_all_the_same(browser, tmp_path):
    "Markup that has got past all escaping: the browser runs none of it"
    evil = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'><p style='color: red' onclick='window.ran = 1'>x</p><iframe srcdoc='<script>parent.ran = 1</script>'></iframe>"
    (tmp_path/'a.html').write_text(document('x').replace('<main>', '<main>' + evil))
    opened(browser, f'file://{tmp_path}/a.html').find_element('css selector', 'main p').click()
    assert browser.execute_script("return [window.ran ?? null, getComputedStyle(document.querySelector('main p')).color]")[0] is None
    assert len(complaints(browser)) >= 3   # each was refused, aloud

@pytest.mark.browser
def test_colours_follow_the_system_and_can_be_switched(browser, tmp_path):
    (tmp_path/'a.html').write_text(document('x'))
    ground = "return getComputedStyle(document.body).backgroundColor"
    seen = {}
    for theme in ('light', 'dark'):
        opened(browser, f'file://{tmp_path}/a.html', theme=theme)
        browser.execute_script('localStorage.clear()')
        opened(browser, f'file://{tmp_path}/a.html', theme=theme)
        seen[theme] = browser.execute_script(ground)
    browser.find_element('css selector', 'button.theme').click()
    assert browser.execute_script(ground) == seen['light'] != seen['dark']
    browser.refresh()
    assert browser.execute_script(ground) == seen['light']   # remembered
    browser.execute_script('localStorage.clear()')
