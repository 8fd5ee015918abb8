//! [`Labels`]: the client name and the label of a client, in `CLIENT LIST` and in its attempts.

use uuid::Uuid;

use crate::error::ConfigError;

/// The maximum length of a [client name](crate::LocksBuilder::client_name), in bytes.
const LONGEST_NAME: usize = 31;

/// The maximum length of a [label](crate::LocksBuilder::label), in bytes. With 32 digits, the
/// longest name and two colons, it fills the 128 bytes that the scripts accept as an attempt.
const LONGEST_LABEL: usize = 63;

/// Before the attempt, the holder of a lock that [stays held](crate::Options::hold_at_least) after
/// its release.
const KEPT: &str = "kept-";

/// The two words that identify a client. A word that is not set is the empty string.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Labels<'a> {
    pub(crate) client_name: &'a str,
    pub(crate) label: &'a str,
}

impl<'a> Labels<'a> {
    pub(crate) fn new(client_name: Option<&'a str>, label: Option<&'a str>) -> Result<Self, ConfigError> {
        for (what, word, most) in
            [("client_name", client_name, LONGEST_NAME), ("label", label, LONGEST_LABEL)]
        {
            let Some(word) = word else { continue };
            if word.is_empty() || word.len() > most || !is_word(word) {
                let text = word.chars().take(80).collect();
                return Err(ConfigError::Word { what, text, most });
            }
        }
        Ok(Labels { client_name: client_name.unwrap_or_default(), label: label.unwrap_or_default() })
    }

    /// Reads the labels of an attempt: `<32 digits>:<client name>:<label>` or a shorter form. A
    /// word of another form has no labels: another program may have written it.
    pub(crate) fn of_attempt(attempt: &'a str) -> Labels<'a> {
        let attempt = attempt.strip_prefix(KEPT).unwrap_or(attempt);
        let Some((id, labels)) = attempt.split_once(':') else { return Labels::default() };
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let (client_name, label) = labels.split_once(':').unwrap_or((labels, ""));
        if id.len() == 32 && id.bytes().all(is_digit) && is_word(client_name) && is_word(label) {
            Labels { client_name, label }
        } else {
            Labels::default()
        }
    }

    /// The connections' name in `CLIENT LIST`, and the holder in logs: `billing:pod-7`, `billing`
    /// or `pod-7`.
    pub(crate) fn joint_name(self) -> Option<String> {
        let words = [self.client_name, self.label].into_iter().filter(|word| !word.is_empty());
        let words: Vec<&str> = words.collect();
        (!words.is_empty()).then(|| words.join(":"))
    }

    /// The end of each attempt of the client: `:billing:pod-7`, `:billing` or `::pod-7`. Without
    /// labels it is empty, so that requests are no longer than needed.
    pub(crate) fn suffix(self) -> String {
        match (self.client_name, self.label) {
            ("", "") => String::new(),
            (name, "") => format!(":{name}"),
            (name, label) => format!(":{name}:{label}"),
        }
    }
}

/// The id in an attempt of this library, without the labels.
pub(crate) fn attempt_id(attempt: &str) -> Option<Uuid> {
    let id = attempt.split_once(':').map_or(attempt, |(id, _)| id);
    Uuid::try_parse(id).ok()
}

/// Whether the word may be a part of an attempt, of a list of attempts, and of a name in `CLIENT
/// LIST`.
fn is_word(word: &str) -> bool {
    word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_read_back_from_an_attempt() {
        let id = Uuid::new_v4();
        let (name, label) = ("n".repeat(LONGEST_NAME), "l".repeat(LONGEST_LABEL));
        for (client_name, label, length) in
            [("", "", 32), ("billing", "", 40), ("", "pod-7", 39), (name.as_str(), label.as_str(), 128)]
        {
            let labels = Labels { client_name, label };
            let attempt = format!("{}{}", id.simple(), labels.suffix());
            assert_eq!(attempt.len(), length, "{attempt}");
            assert_eq!(Labels::of_attempt(&attempt), labels, "{attempt}");
            assert_eq!(Labels::of_attempt(&format!("{KEPT}{attempt}")), labels, "{attempt}");
            assert_eq!(attempt_id(&attempt), Some(id), "{attempt}");
        }
    }

    #[test]
    fn words_of_other_programs_have_no_labels() {
        let id = Uuid::new_v4();
        let (plain, usual) = (id.simple().to_string(), id.to_string());
        for word in [
            String::new(),
            "a:b:c".to_owned(),
            format!("{usual}:61"),
            format!("{plain}:a:b:c"),
            format!("{plain}:a b"),
            format!("{plain}::ä"),
            format!("{}:a:b", plain.to_uppercase().replace(|c: char| c.is_ascii_digit(), "A")),
        ] {
            assert_eq!(Labels::of_attempt(&word), Labels::default(), "{word}");
        }
    }
}
