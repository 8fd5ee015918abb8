//! One connection between a client and a server, which passes one request or one answer at a time.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};

use super::request_names::word;

/// Everything that is written at a time fits in.
pub(super) const CAPACITY: usize = 1 << 20;

const MESSAGE: &str = "message";
const PING: &[u8] = b"*1\r\n$4\r\nPING\r\n";
const PONG: &[u8] = b"+PONG\r\n";

pub(super) struct Line {
    pub(super) address: String,
    /// Which node it leads to.
    pub(super) place: usize,
    /// `None`: cut, on the client's side.
    client: Option<DuplexStream>,
    server: UnixStream,
    sent: Vec<u8>,
    answered: Vec<u8>,
    /// Each with its word.
    requests: VecDeque<(String, Vec<u8>)>,
    /// Each with the word of what it answers.
    answers: VecDeque<(String, Vec<u8>)>,
    /// Messages may come that nobody asks for.
    listens: bool,
    /// The client has gone.
    ended: bool,
    /// Nothing passes any more, and nobody is told.
    pub(super) hangs: bool,
}

impl Line {
    pub(super) fn new(address: String, place: usize, client: DuplexStream, server: UnixStream) -> Line {
        Line {
            address,
            place,
            client: Some(client),
            server,
            sent: Vec::new(),
            answered: Vec::new(),
            requests: VecDeque::new(),
            answers: VecDeque::new(),
            listens: false,
            ended: false,
            hangs: false,
        }
    }

    /// Takes what the client has written so far.
    pub(super) fn gather(&mut self) {
        let Some(client) = &mut self.client else { return };
        let mut space = [0; 4096];
        loop {
            let mut buffer = ReadBuf::new(&mut space);
            let context = &mut Context::from_waker(Waker::noop());
            match Pin::new(&mut *client).poll_read(context, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {
                    self.sent.extend_from_slice(buffer.filled());
                }
                Poll::Pending => break,
                Poll::Ready(_) => {
                    self.ended = true;
                    break;
                }
            }
        }
        while let Some(request) = first_frame(&mut self.sent) {
            self.requests.push_back((word(&request), request));
        }
    }

    /// Whether nothing will ever pass again.
    pub(super) fn is_over(&self) -> bool {
        (self.ended || self.client.is_none()) && self.requests.is_empty()
    }

    /// Hands one request to the server, which runs it. False if there is none.
    pub(super) fn deliver(&mut self) -> bool {
        let Some((word, request)) = self.requests.pop_front() else { return false };
        self.listens |= request.windows(9).any(|word| word == b"SUBSCRIBE");
        self.server.write_all(&request).unwrap();
        loop {
            let frame = self.hear();
            if !is_message(&frame) {
                self.answers.push_back((word, frame));
                return true;
            }
            self.answers.push_back((MESSAGE.to_owned(), frame));
        }
    }

    /// Hears what was published until now.
    pub(super) fn listen(&mut self) {
        if !self.listens {
            return;
        }
        self.server.write_all(PING).unwrap();
        loop {
            let frame = self.hear();
            if frame == PONG {
                return;
            }
            self.answers.push_back((MESSAGE.to_owned(), frame));
        }
    }

    /// Hands one answer, or message, to the client. False if there is none.
    pub(super) fn answer(&mut self) -> bool {
        let Some((_, answer)) = self.answers.pop_front() else { return false };
        if let Some(client) = &mut self.client {
            let context = &mut Context::from_waker(Waker::noop());
            let written = Pin::new(client).poll_write(context, &answer);
            let gone = matches!(written, Poll::Ready(Err(_)));
            assert!(gone || matches!(written, Poll::Ready(Ok(all)) if all == answer.len()), "{written:?}");
        }
        true
    }

    /// What was sent and is not answered, as far as the client knows, and the messages that it has not heard.
    pub(super) fn under_way(&self) -> impl Iterator<Item = &str> {
        self.requests.iter().chain(&self.answers).map(|(word, _)| word.as_str())
    }

    /// The client sees it break. What it has sent is on its way.
    pub(super) fn cut(&mut self) {
        self.client = None;
        self.answers.clear();
    }

    pub(super) fn forget_requests(&mut self) {
        self.requests.clear();
    }

    /// The next frame from the server.
    fn hear(&mut self) -> Vec<u8> {
        loop {
            if let Some(frame) = first_frame(&mut self.answered) {
                return frame;
            }
            let mut space = [0; 4096];
            let count = self.server.read(&mut space).unwrap();
            assert!(count > 0, "the server has closed a connection");
            self.answered.extend_from_slice(&space[..count]);
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

/// Where the first frame of the protocol ends, if all of it is there.
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
fn frames_end_where_they_end() {
    let frames = ["+OK\r\n", "$-1\r\n", "$2\r\nab\r\n", "*2\r\n$1\r\nx\r\n:7\r\n", "%1\r\n+a\r\n*0\r\n"];
    for frame in frames {
        let more = [frame, "+next"].concat();
        assert_eq!(frame_end(more.as_bytes()), Some(frame.len()), "{frame:?}");
        assert_eq!(frame_end(&frame.as_bytes()[..frame.len() - 1]), None, "{frame:?}");
    }
}
