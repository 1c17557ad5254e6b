"A server of pages for one machine: who is answered, who isn't, and that nothing else is read"

import http.client, io, socket, threading, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from fastrl_replay.look.server import Server
from fastrl_replay.steps.errors import ArgumentError


def ask(server, path, method='GET', **headers):
    with closing(http.client.HTTPConnection('127.0.0.1', server.server_port, timeout=20)) as c:
        c.request(method, path, headers=headers)
        r = c.getresponse()
        return r.status, r.read(), r.headers


def raw(server, text):
    "What is answered to these bytes"
    with closing(socket.create_connection(('127.0.0.1', server.server_port), timeout=20)) as c:
        c.sendall(text)
        return c.recv(65536)


@pytest.fixture
def server():
    "Tells which names it was asked for"

    def answer(name):
        asked.append(name)
        return ('text/plain', name.encode()) if name in ('', 'a') else None

    asked = []
    with Server(answer) as s:
        s.asked = asked
        yield s


@pytest.mark.parametrize(
    'path',
    [
        '/',
        '',
        '/a',
        '/x/',
        '/{token}',
        '/{token}x/',
        '/{short}/',
        '/a/{token}/',
        '/%s/',
        '/\\{token}/',
        '/?{token}/',
        'http://127.0.0.1/{token}/',
    ],
)
def test_nothing_without_the_whole_token(server, path):
    status, said, _ = ask(
        server, path.format(token=server.token, short=server.token[:-1]) if '{' in path else path
    )
    assert status == 403 and server.asked == [] and server.token.encode() not in said


def test_each_server_has_another_token():
    with Server(lambda name: None) as a, Server(lambda name: None) as b:
        assert a.token != b.token and len(a.token) >= 20


@pytest.mark.parametrize(
    'host, status',
    [
        ('127.0.0.1:{port}', 200),
        ('localhost', 200),
        ('localhost:1', 200),
        ('evil.example', 403),
        ('evil.example:{port}', 403),
        ('127.0.0.1.evil.example', 403),
        ('', 403),
        ('127.0.0.1@evil.example', 403),
        ('[::1', 403),
        ('0.0.0.0', 403),
        ('localhost.', 403),
    ],
)
def test_a_name_that_leads_here_is_not_enough(server, host, status):
    "A web page whose name is made to lead to 127.0.0.1 would ask with that name"
    assert ask(server, f'/{server.token}/', Host=host.format(port=server.server_port))[0] == status


def test_a_request_without_a_host_is_refused(server):
    assert b' 403 ' in raw(server, f'GET /{server.token}/ HTTP/1.0\r\n\r\n'.encode())


@pytest.mark.parametrize(
    'method', ['POST', 'PUT', 'DELETE', 'PATCH', 'OPTIONS', 'HEAD', 'TRACE', 'NONSENSE']
)
def test_only_get(server, method):
    assert ask(server, f'/{server.token}/', method)[0] == 501 and server.asked == []


@pytest.mark.parametrize(
    'name',
    ['../../etc/passwd', '..%2f..%2fetc%2fpasswd', '/etc/passwd', './a', 'a/', 'a%00', 'A', 'a;b'],
)
def test_names_are_those_of_pages_and_no_files(server, name):
    status, said, _ = ask(server, f'/{server.token}/{name}')
    assert status == 404 and b'root' not in said and server.asked == [name]


def test_what_a_browser_is_told(server):
    for path in (f'/{server.token}/', '/x/', f'/{server.token}/x'):
        headers = ask(server, path)[2]
        assert (
            headers['Cache-Control'] == 'no-store'
            and headers['X-Content-Type-Options'] == 'nosniff'
            and headers['Referrer-Policy'] == 'no-referrer'
        )
        assert (
            "default-src 'none'" in headers['Content-Security-Policy']
            and headers['Server'].strip() == 'fastrl-replay'
        )
    assert ask(server, f'/{server.token}/a?x=1')[:2] == (200, b'a')


def test_it_listens_on_this_machine_alone(server):
    assert server.server_address[0] == '127.0.0.1'


def test_many_at_a_time():
    "One that is slow, and one that never ends its request, are in no other one's way"
    slow = threading.Event()

    def answer(name):
        if name == 'slow':
            slow.wait(20)
        return 'text/plain', name.encode() * 10_000

    with (
        Server(answer) as s,
        closing(socket.create_connection(('127.0.0.1', s.server_port))) as hangs,
        ThreadPoolExecutor(32) as pool,
    ):
        hangs.sendall(b'GET /')
        late = pool.submit(ask, s, f'/{s.token}/slow')
        found = [*pool.map(lambda i: ask(s, f'/{s.token}/{i}')[:2], range(200))]
        assert found == [(200, str(i).encode() * 10_000) for i in range(200)] and not late.done()
        slow.set()
        assert late.result()[0] == 200


def test_who_goes_away_is_no_error(capfd):
    with Server(lambda name: ('text/plain', b'x' * 10_000_000)) as s:
        for _ in range(5):
            with closing(socket.create_connection(('127.0.0.1', s.server_port))) as c:
                c.sendall(f'GET /{s.token}/ HTTP/1.1\r\nHost: localhost\r\n\r\n'.encode())
        assert len(ask(s, f'/{s.token}/')[1]) == 10_000_000
    assert capfd.readouterr() == ('', '')


def test_files_are_sent_as_they_are_and_closed():
    file = io.BytesIO(bytes(range(256)) * 5000)
    with Server(lambda name: ('video/mp4', file)) as s:
        assert ask(s, f'/{s.token}/x')[1] == bytes(range(256)) * 5000
    assert file.closed


def test_a_page_that_fails_says_so(server):
    server.answer = lambda name: {}[name]
    assert (
        ask(server, f'/{server.token}/<b>')[:2] == (500, b"KeyError: '<b>'")
        and ask(server, f'/{server.token}/x')[2]['Content-Type'] == 'text/plain; charset=utf-8'
    )


@pytest.mark.parametrize('port, said', [(None, 'it is in use'), (70_000, 'port must be 0-65535')])
def test_a_port_that_cannot_be_had(server, port, said):
    with pytest.raises(ArgumentError, match=said):
        Server(lambda name: None, port or server.server_port)


def test_no_connection_outlives_it():
    "A browser keeps connections open, if it may, and would go on asking"
    with (
        Server(lambda name: ('text/plain', b'x')) as s,
        closing(socket.create_connection(('127.0.0.1', s.server_port), timeout=20)) as c,
    ):
        c.sendall(
            f'GET /{s.token}/ HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n'.encode()
        )
        said = b''
        while part := c.recv(65536):
            said += part  # until it is closed
        assert said.endswith(b'\r\n\r\nx')


def test_it_ends_at_once():
    began = time.monotonic()
    with Server(lambda name: None) as s:
        port = s.server_port
    assert time.monotonic() - began < 5
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(('127.0.0.1', port))
