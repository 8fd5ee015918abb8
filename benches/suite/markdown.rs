//! Pieces of a page.

use std::fmt::Write;

use super::Outcome;

/// Writes lines of at most 100 columns.
pub(crate) fn wrap(page: &mut String, text: &str) -> Outcome<()> {
    let indent = if text.starts_with("- ") { "  " } else { "" };
    let mut column = 0;
    for word in text.split(' ') {
        if column > 0 && column + 1 + word.len() > 100 {
            write!(page, "\n{indent}")?;
            column = indent.len();
        } else if column > 0 {
            page.push(' ');
            column += 1;
        }
        page.push_str(word);
        column += word.len();
    }
    Ok(writeln!(page)?)
}

pub(crate) fn paragraph(page: &mut String, text: &str) -> Outcome<()> {
    for part in text.split("\n\n") {
        wrap(page, part)?;
        writeln!(page)?;
    }
    Ok(())
}

pub(crate) fn or_dash(value: Option<String>) -> String {
    value.unwrap_or_else(|| "-".to_owned())
}

pub(crate) fn bold(text: String, is_bold: bool) -> String {
    if is_bold { format!("**{text}**") } else { text }
}
