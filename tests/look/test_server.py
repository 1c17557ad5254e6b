"""A server of pages for one machine: which requests are answered, and that nothing else is read."""

import http.client
import socket
import threading
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


def connect(server):
    return closing(socket.create_connection(('127.0.0.1', server.server_port), timeout=20))


@pytest.fixture
def server():
    "A server that notes which names it was asked for"

    def answer(name):
        asked.append(name)
        return ('text/plain', name.encode()) if name in ('', 'a') else None

    asked = []
    with Server(answer) as s:
        s.asked = asked
        yield s


@pytest.mark.parametrize('path', ['/', '/a', '/{token}', '/{short}/', '/a/{token}/', '/?{token}/'])
def test_nothing_without_the_whole_token(server, path):
    path = path.format(token=server.token, short=server.token[:-1])
    status, said, _ = ask(server, path)
    assert status == 403 and server.asked == [] and server.token.encode() not in said
    with Server(lambda name: None) as other:
        assert other.token != server.token and len(other.token) >= 20


@pytest.mark.parametrize(
    'host, status',
    [
        ('127.0.0.1:{port}', 200),
        ('localhost', 200),
        ('evil.example:{port}', 403),
        ('127.0.0.1.evil.example', 403),
        ('', 403),
        ('0.0.0.0', 403),
    ],
)
def test_a_name_that_leads_here_is_not_enough(server, host, status):
    "A web page whose name is made to lead to 127.0.0.1 would ask with that name"
    assert ask(server, f'/{server.token}/', Host=host.format(port=server.server_port))[0] == status
    assert server.server_address[0] == '127.0.0.1'


def test_a_request_without_a_host_is_refused(server):
    with connect(server) as c:
        c.sendall(f'GET /{server.token}/ HTTP/1.0\r\n\r\n'.encode())
        assert b' 403 ' in c.recv(65536)


@pytest.mark.parametrize('method', ['POST', 'OPTIONS', 'NONSENSE'])
def test_only_get(server, method):
    assert ask(server, f'/{server.token}/', method)[0] == 501 and server.asked == []


@pytest.mark.parametrize('name', ['../../etc/passwd', '..%2f..%2fetc%2fpasswd', 'a/'])
def test_names_are_those_of_pages_and_no_files(server, name):
    status, said, _ = ask(server, f'/{server.token}/{name}')
    assert status == 404 and b'root' not in said and server.asked == [name]


def test_headers(server):
    for path in f'/{server.token}/', '/x/':
        headers = ask(server, path)[2]
        assert headers['Cache-Control'] == 'no-store'
        assert headers['X-Content-Type-Options'] == 'nosniff'
        assert "default-src 'none'" in headers['Content-Security-Policy']
    assert ask(server, f'/{server.token}/a?x=1')[:2] == (200, b'a')


def test_many_at_a_time(capfd):
    "A slow page, a request that never ends and a client that goes away are in no other one's way"
    slow = threading.Event()

    def answer(name):
        if name == 'slow':
            slow.wait(20)
        return 'text/plain', name.encode() * 1_000_000

    with Server(answer) as s, connect(s) as hangs, ThreadPoolExecutor(8) as pool:
        hangs.sendall(b'GET /')
        late = pool.submit(ask, s, f'/{s.token}/slow')
        with connect(s) as leaves:
            leaves.sendall(f'GET /{s.token}/ HTTP/1.1\r\nHost: localhost\r\n\r\n'.encode())
        found = [*pool.map(lambda i: ask(s, f'/{s.token}/{i}')[:2], range(30))]
        assert found == [(200, str(i).encode() * 1_000_000) for i in range(30)]
        assert not late.done()
        slow.set()
        assert late.result()[0] == 200
    assert capfd.readouterr() == ('', '')


def test_a_page_that_fails_says_so(server):
    server.answer = lambda name: {}[name]
    status, said, headers = ask(server, f'/{server.token}/<b>')
    assert (status, said) == (500, b"KeyError: '<b>'")
    assert headers['Content-Type'] == 'text/plain; charset=utf-8'


def test_a_port_that_is_taken_is_an_error(server):
    with pytest.raises(ArgumentError, match='it is in use'):
        Server(lambda name: None, server.server_port)


def test_no_connection_outlives_it():
    "A browser keeps connections open, if it may, and would go on asking"
    with Server(lambda name: ('text/plain', b'x')) as s, connect(s) as c:
        host = 'Host: localhost\r\nConnection: keep-alive'
        c.sendall(f'GET /{s.token}/ HTTP/1.1\r\n{host}\r\n\r\n'.encode())
        said = b''
        while part := c.recv(65536):
            said += part  # until it is closed
        assert said.endswith(b'\r\n\r\nx')
