"What tests of pages share: a page opened in Chromium, and what it may not do."

from selenium.webdriver.support.ui import WebDriverWait

HOSTILE = [
    '<script>window.ran = 1</script>',
    '"><img src=x onerror="window.ran = 1">',
    "'; window.ran = 1; '",
    '</script><svg onload="window.ran = 1">',
    '<!--',
    ']]>',
    '\u2028window.ran = 1',
    '{{constructor}}',
    'javascript:window.ran = 1',
    '__proto__',
    '&lt;b&gt;',
    '\x00\ud800',
]


def opened(browser, url, width=1200, theme='light', height=900, scripts=True):
    "A page in a window of that width; what was open before is left, and its complaints"
    browser.get('about:blank')
    browser.get_log('browser')
    browser.execute_cdp_cmd(
        'Emulation.setDeviceMetricsOverride',
        dict(width=width, height=height, deviceScaleFactor=1, mobile=False),
    )
    browser.execute_cdp_cmd(
        'Emulation.setEmulatedMedia',
        dict(features=[dict(name='prefers-color-scheme', value=theme)]),
    )
    browser.execute_cdp_cmd('Emulation.setScriptExecutionDisabled', dict(value=not scripts))
    browser.get(str(url))
    if scripts:
        WebDriverWait(browser, 30).until(
            lambda b: b.execute_script("return document.readyState == 'complete'")
        )
    return browser


def complaints(browser):
    return [l['message'] for l in browser.get_log('browser') if l['level'] in ('SEVERE', 'WARNING')]


def sticking_out(browser):
    "What is wider than the window, and doesn't scroll by itself"
    return browser.execute_script("""
        const scrolls = e => e && (/auto|scroll|hidden/.test(getComputedStyle(e).overflowX)
            || scrolls(e.parentElement));
        const sticks = r => r.width && (r.right > innerWidth + 1 || r.left < -1);
        const out = [...document.querySelectorAll('body *')]
            .filter(e => sticks(e.getBoundingClientRect()) && !scrolls(e.parentElement));
        const wide = document.documentElement.scrollWidth;
        return [wide > innerWidth ? `${wide} px wide` : null,
            ...out.map(e => e.outerHTML.slice(0, 150))].filter(x => x)""")
