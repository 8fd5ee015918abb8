//! Rewrites addresses and run ids in the replies that pass through a proxy.

use super::proxy::DIRECT;

/// Replaces words in a stream that arrives in pieces of any length: the servers' address by the
/// proxies', and optionally the field name `run_id`.
pub struct AddressRewriter {
    replaced: Vec<(&'static [u8], Vec<u8>)>,
    /// The end of the last piece, held back since it may be the beginning of a word to replace. No
    /// reply ends like that.
    kept: Vec<u8>,
}

impl AddressRewriter {
    pub fn to(host: &str, hides: bool) -> AddressRewriter {
        let replaced = [(DIRECT, host), ("run_id:", "hidden:")];
        let words = replaced.into_iter().take(if hides { 2 } else { 1 });
        AddressRewriter {
            replaced: words.map(|(from, to)| (from.as_bytes(), to.into())).collect(),
            kept: Vec::new(),
        }
    }

    pub fn pass(&mut self, piece: &[u8]) -> Vec<u8> {
        let mut bytes = std::mem::take(&mut self.kept);
        bytes.extend_from_slice(piece);
        let mut kept = 0;
        for (from, to) in &self.replaced {
            let mut start = 0;
            while start + from.len() <= bytes.len() {
                if bytes[start..].starts_with(from) {
                    bytes[start..start + from.len()].copy_from_slice(to);
                }
                start += 1;
            }
            let ends = |&length: &usize| bytes.ends_with(&from[..length]);
            kept = (1..from.len().min(bytes.len() + 1)).rev().find(ends).unwrap_or(0).max(kept);
        }
        self.kept = bytes.split_off(bytes.len() - kept);
        bytes
    }
}

#[test]
fn proxy_replaces_addresses_split_between_pieces() {
    let sent = b"+MOVED 7 127.0.0.1:7000 1\r\n127.0.127.0.0.1112\r\nrun_run_id:7\r\n";
    let received = b"+MOVED 7 127.0.0.2:7000 1\r\n127.0.127.0.0.2112\r\nrun_hidden:7\r\n";
    for length in 1..sent.len() {
        let mut moved = AddressRewriter::to(super::proxy::PROXIED, true);
        let mut passed: Vec<u8> = sent.chunks(length).flat_map(|piece| moved.pass(piece)).collect();
        passed.append(&mut moved.kept);
        assert_eq!(passed, received, "in pieces of {length}");
    }
}
