//! A connection between a client and a server that delivers one request or one reply at a time.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};

use super::request_names::request_name;

/// The buffer between client and test: larger than anything that is written at once.
pub(super) const CAPACITY: usize = 1 << 20;

const MESSAGE: &str = "message";
const PING: &[u8] = b"*1\r\n$4\r\nPING\r\n";
const PONG: &[u8] = b"+PONG\r\n";

pub(super) struct Connection {
    pub(super) address: String,
    /// The index of its node.
    pub(super) node: usize,
    /// `None` once the client's side is cut.
    client: Option<DuplexStream>,
    server: UnixStream,
    from_client: Vec<u8>,
    from_server: Vec<u8>,
    /// Requests that were not delivered, each with its name.
    requests: VecDeque<(String, Vec<u8>)>,
    /// Replies that were not delivered, each with the name of its request.
    replies: VecDeque<(String, Vec<u8>)>,
    /// The client has subscribed, so messages may arrive at any time.
    is_subscribed: bool,
    /// The client has closed the connection.
    ended: bool,
    /// Nothing is delivered, and the connection stays open.
    pub(super) is_silent: bool,
}

impl Connection {
    pub(super) fn new(address: String, node: usize, client: DuplexStream, server: UnixStream) -> Connection {
        Connection {
            address,
            node,
            client: Some(client),
            server,
            from_client: Vec::new(),
            from_server: Vec::new(),
            requests: VecDeque::new(),
            replies: VecDeque::new(),
            is_subscribed: false,
            ended: false,
            is_silent: false,
        }
    }

    /// Reads what the client has written so far.
    pub(super) fn gather(&mut self) {
        let Some(client) = &mut self.client else { return };
        let mut space = [0; 4096];
        loop {
            let mut buffer = ReadBuf::new(&mut space);
            let context = &mut Context::from_waker(Waker::noop());
            match Pin::new(&mut *client).poll_read(context, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {
                    self.from_client.extend_from_slice(buffer.filled());
                }
                Poll::Pending => break,
                Poll::Ready(_) => {
                    self.ended = true;
                    break;
                }
            }
        }
        while let Some(request) = first_frame(&mut self.from_client) {
            self.requests.push_back((request_name(&request), request));
        }
    }

    /// Whether nothing will be delivered any more.
    pub(super) fn is_over(&self) -> bool {
        (self.ended || self.client.is_none()) && self.requests.is_empty()
    }

    /// Delivers one request to the server, which runs it. False if there is none.
    pub(super) fn deliver(&mut self) -> bool {
        let Some((name, request)) = self.requests.pop_front() else { return false };
        self.is_subscribed |= request.windows(9).any(|word| word == b"SUBSCRIBE");
        self.server.write_all(&request).unwrap();
        loop {
            let frame = self.read_frame();
            if !is_message(&frame) {
                self.replies.push_back((name, frame));
                return true;
            }
            self.replies.push_back((MESSAGE.to_owned(), frame));
        }
    }

    /// Reads the messages that were published until now.
    pub(super) fn read_messages(&mut self) {
        if !self.is_subscribed {
            return;
        }
        self.server.write_all(PING).unwrap();
        loop {
            let frame = self.read_frame();
            if frame == PONG {
                return;
            }
            self.replies.push_back((MESSAGE.to_owned(), frame));
        }
    }

    /// Delivers one reply or message to the client. False if there is none.
    pub(super) fn reply(&mut self) -> bool {
        let Some((_, reply)) = self.replies.pop_front() else { return false };
        if let Some(client) = &mut self.client {
            let context = &mut Context::from_waker(Waker::noop());
            let written = Pin::new(client).poll_write(context, &reply);
            let gone = matches!(written, Poll::Ready(Err(_)));
            assert!(gone || matches!(written, Poll::Ready(Ok(all)) if all == reply.len()), "{written:?}");
        }
        true
    }

    /// The names of the requests whose replies the client has not received, and of messages in
    /// flight.
    pub(super) fn in_flight(&self) -> impl Iterator<Item = &str> {
        self.requests.iter().chain(&self.replies).map(|(name, _)| name.as_str())
    }

    /// Breaks the connection for the client. Its requests are still delivered.
    pub(super) fn cut(&mut self) {
        self.client = None;
        self.replies.clear();
    }

    pub(super) fn drop_requests(&mut self) {
        self.requests.clear();
    }

    /// Reads the next frame from the server.
    fn read_frame(&mut self) -> Vec<u8> {
        loop {
            if let Some(frame) = first_frame(&mut self.from_server) {
                return frame;
            }
            let mut space = [0; 4096];
            let count = self.server.read(&mut space).unwrap();
            assert!(count > 0, "the server has closed a connection");
            self.from_server.extend_from_slice(&space[..count]);
        }
    }
}

fn is_message(frame: &[u8]) -> bool {
    frame.starts_with(b">") && frame.windows(11).any(|word| word == b"$7\r\nmessage")
}

fn first_frame(bytes: &mut Vec<u8>) -> Option<Vec<u8>> {
    let end = frame_end(bytes)?;
    Some(bytes.drain(..end).collect())
}

/// The length of the first frame, if it is complete.
fn frame_end(bytes: &[u8]) -> Option<usize> {
    let line = bytes.windows(2).position(|end| end == b"\r\n")? + 2;
    let count = || std::str::from_utf8(&bytes[1..line - 2]).unwrap().parse::<i64>().unwrap();
    let items = match bytes[0] {
        b'$' | b'=' | b'!' => {
            let end = usize::try_from(count()).map_or(line, |length| line + length + 2);
            return (bytes.len() >= end).then_some(end);
        }
        b'*' | b'>' | b'~' => count(),
        b'%' | b'|' => 2 * count(),
        _ => 0,
    };
    (0..items).try_fold(line, |end, _| Some(end + frame_end(&bytes[end..])?))
}

#[test]
fn frame_end_is_the_length_of_a_complete_frame() {
    let frames = ["+OK\r\n", "$-1\r\n", "$2\r\nab\r\n", "*2\r\n$1\r\nx\r\n:7\r\n", "%1\r\n+a\r\n*0\r\n"];
    for frame in frames {
        let more = [frame, "+next"].concat();
        assert_eq!(frame_end(more.as_bytes()), Some(frame.len()), "{frame:?}");
        assert_eq!(frame_end(&frame.as_bytes()[..frame.len() - 1]), None, "{frame:?}");
    }
}
