//! The header of a script: its contract.

/// A key, an argument or an answer, with its text in the header.
#[derive(Clone)]
pub struct Entry {
    pub name: String,
    pub text: String,
}

impl Entry {
    /// The default of an optional argument. `None`: the argument is required.
    pub fn default(&self) -> Option<&str> {
        Some(self.text.split_once("; default: ")?.1)
    }

    /// The text without the default.
    pub fn meaning(&self) -> &str {
        self.text.split("; default: ").next().unwrap_or_default()
    }
}

/// The header of a source, read line by line.
#[derive(Default)]
pub struct Header {
    pub summary: String,
    pub keys: Vec<Entry>,
    pub arguments: Vec<Entry>,
    answers: Vec<Entry>,
    pub notes: String,
}

impl Header {
    pub fn parse(name: &str, source: &str) -> Header {
        let lines = source.lines().map_while(|line| line.strip_prefix("--"));
        let lines = lines.take_while(|line| !line.starts_with('@'));
        let mut header = Header::default();
        let (mut paragraph, mut section) = (0, "");
        for line in lines {
            let line = line.strip_prefix(' ').unwrap_or(line);
            if line.is_empty() {
                (paragraph, section) = (paragraph + 1, "");
            } else if line.starts_with("KEYS[") || line.starts_with("ARGV[") {
                section = &line[..4];
                let list = if section == "KEYS" { &mut header.keys } else { &mut header.arguments };
                let (place, rest) = line[5..].split_once(']').unwrap();
                list.push(entry(name, rest));
                assert_eq!(place, list.len().to_string(), "{name}: {line}");
            } else if let Some(rest) = line.strip_prefix("Returns  ") {
                section = "Returns";
                header.answers.push(entry(name, rest));
            } else if section == "Returns" && line.starts_with("         ") && !line.starts_with("          ")
            {
                header.answers.push(entry(name, line));
            } else {
                let text = match section {
                    "KEYS" => &mut header.keys.last_mut().unwrap().text,
                    "ARGV" => &mut header.arguments.last_mut().unwrap().text,
                    "Returns" => &mut header.answers.last_mut().unwrap().text,
                    _ if paragraph == 0 => &mut header.summary,
                    _ => &mut header.notes,
                };
                *text = format!("{text} {}", line.trim()).trim().to_owned();
            }
        }
        let summary = header.summary.strip_prefix(&format!("{name}: "));
        let summary = summary.unwrap_or_else(|| panic!("{name}: the header does not begin with the name"));
        header.summary = summary.to_owned();
        assert!(!header.answers.is_empty(), "{name}: the header lists no answers");
        header
    }

    /// The answers of the script, except for the refusals.
    pub fn answers(&self) -> impl Iterator<Item = Entry> {
        self.answers.iter().filter(|entry| !entry.text.starts_with("refused: ")).cloned()
    }

    pub fn refusals(&self) -> impl Iterator<Item = Entry> {
        self.answers.iter().filter_map(|Entry { name, text }| {
            Some(Entry { name: name.clone(), text: text.strip_prefix("refused: ")?.to_owned() })
        })
    }

    /// The signature in the format of the pages: keys and arguments, with the optional ones in
    /// brackets.
    pub fn signature(&self) -> String {
        format!("keys: {} arguments: {}", list(&self.keys), list(&self.arguments))
    }
}

/// Parses `name  text`.
fn entry(script: &str, line: &str) -> Entry {
    let (name, text) = line.trim().split_once("  ").unwrap_or_else(|| panic!("{script}: {line}"));
    Entry { name: name.to_owned(), text: text.trim().to_owned() }
}

fn list(entries: &[Entry]) -> String {
    let words: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    match entries.iter().position(|entry| entry.default().is_some()) {
        None if words.is_empty() => "none".to_owned(),
        None => words.join(" "),
        Some(0) => format!("[{}]", words.join(" ")),
        Some(at) => format!("{} [{}]", words[..at].join(" "), words[at..].join(" ")),
    }
}
