//! Tells the replies to TIME, CONFIG GET and INFO, which a new connection sends beside its first
//! scripts, from those to scripts.

/// The length of the replies at the start that are a text or a list of texts.
pub fn length_of_texts(replies: &[u8]) -> usize {
    let mut rest = replies;
    loop {
        let before = rest;
        rest = rest.strip_prefix(b"*2\r\n").unwrap_or(rest);
        while let Some(after) = after_text(rest) {
            rest = after;
        }
        // A list that holds something else is of a script.
        if rest.len() == before.len() || rest.len() + 4 == before.len() {
            return replies.len() - before.len();
        }
    }
}

/// What follows a text.
fn after_text(reply: &[u8]) -> Option<&[u8]> {
    let end = reply.windows(2).position(|bytes| bytes == b"\r\n")?;
    let length: usize = std::str::from_utf8(reply.strip_prefix(b"$")?.get(..end - 1)?).ok()?.parse().ok()?;
    reply.get(end + 2 + length + 2..)
}

#[test]
fn texts_before_a_reply_of_a_script_are_found() {
    let texts = "*2\r\n$10\r\n1795737316\r\n$6\r\n605834\r\n$3\r\na\r\n\r\n";
    for (replies, length) in [
        (format!("{texts}*1\r\n:1\r\n"), texts.len()),
        (format!("{texts}*2\r\n:1\r\n:2\r\n"), texts.len()),
        (texts.to_owned(), texts.len()),
        (":1\r\n".to_owned(), 0),
        ("$10\r\nhalf".to_owned(), 0),
    ] {
        assert_eq!(length_of_texts(replies.as_bytes()), length, "{replies:?}");
    }
}
