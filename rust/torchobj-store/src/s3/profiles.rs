//! Reads the shared configuration files of AWS (`~/.aws/config` and `~/.aws/credentials`) as botocore does, and selects a
//! profile. Does not decide which of their settings are used.
//!
//! The SDK ignores profiles whose names have spaces, and does not tell which file has a setting: it receives the settings of
//! the selected profile, as a file that has no other.

use std::collections::HashMap;
use std::fmt::Write;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::credentials::Refused;
use crate::http::sanitize;

/// The settings of a section, by their lower-case names.
pub(super) type Section = HashMap<String, String>;

const DEFAULT: &str = "default";
/// Where a profile is named, in the order in which it applies.
const OPTION: &str = "profile=";
const VARIABLES: [&str; 2] = ["AWS_DEFAULT_PROFILE", "AWS_PROFILE"];

/// The shared configuration files. Without `Debug`, because they have secrets.
pub(super) struct Profiles {
    config: File,
    credentials: File,
    sso_sessions: HashMap<String, Section>,
    services: HashMap<String, Section>,
    selected: String,
    named_by: Option<&'static str>,
}

/// The profiles of a file.
struct File {
    path: PathBuf,
    profiles: HashMap<String, Section>,
}

impl Profiles {
    /// Reads the files. Selects the profile `option`, or that of the environment, or `default`.
    ///
    /// # Errors
    /// A file is not valid, or a profile that is named does not exist.
    pub(super) fn load(option: Option<&str>) -> Result<Self, Refused> {
        let variable = || VARIABLES.into_iter().find_map(|name| Some((std::env::var(name).ok()?, name)));
        let named = option.map(|name| (name.to_owned(), OPTION)).or_else(variable);
        let (credentials_path, credentials) = shared_file("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")?;
        let (config_path, sections) = shared_file("AWS_CONFIG_FILE", "~/.aws/config")?;
        let (mut config, mut sso_sessions, mut services) = (HashMap::new(), HashMap::new(), HashMap::new());
        for (header, section) in sections {
            let of_kind = |kind| header.starts_with(kind).then(|| second_word(&header)).flatten();
            if header == DEFAULT {
                config.insert(header, section);
            } else if let Some(name) = of_kind("profile") {
                config.insert(name, section);
            } else if let Some(name) = of_kind("sso-session") {
                sso_sessions.insert(name, section);
            } else if let Some(name) = of_kind("services") {
                services.insert(name, section);
            }
        }
        let named_by = named.as_ref().map(|(_, by)| *by);
        let selected = named.map_or_else(|| DEFAULT.to_owned(), |(name, _)| name);
        let config = File { path: config_path, profiles: config };
        let credentials = File { path: credentials_path, profiles: credentials.into_iter().collect() };
        let profiles = Self { config, credentials, sso_sessions, services, selected, named_by };
        match named_by {
            Some(by) if !profiles.exists(&profiles.selected) => Err(profiles.missing(by)),
            _ => Ok(profiles),
        }
    }

    fn missing(&self, by: &str) -> Refused {
        let name = sanitize(&self.selected, 100);
        let mut message = format!("the profile {name:?} does not exist in {} ({by} names it)", self.files());
        if name.is_empty() {
            message = format!("{by} is empty, and no profile has an empty name");
        } else if name.contains(char::is_whitespace) {
            let _ = write!(message, "; a name with spaces is written [profile \"{name}\"] in the first of them");
        }
        let hint = "name a profile of `aws configure list-profiles`, or unset the variable".to_owned();
        Refused { message: format!("{message}; no credentials"), hint: Some(hint) }
    }

    /// The name of the selected profile.
    pub(super) fn selected(&self) -> &str {
        &self.selected
    }

    /// Whether the caller has named the profile, rather than the environment.
    pub(super) fn is_explicit(&self) -> bool {
        self.named_by == Some(OPTION)
    }

    /// Returns whether one of the files has a profile.
    pub(super) fn exists(&self, profile: &str) -> bool {
        [&self.config, &self.credentials].into_iter().any(|file| file.profiles.contains_key(profile))
    }

    /// A setting of a profile; that of the credentials file takes precedence.
    pub(super) fn get<'a>(&'a self, profile: &str, name: &str) -> Option<&'a str> {
        let value = |file: &'a File| file.profiles.get(profile)?.get(name);
        value(&self.credentials).or_else(|| value(&self.config)).map(String::as_str)
    }

    /// The section of a profile in the credentials file.
    pub(super) fn in_credentials(&self, profile: &str) -> Option<&Section> {
        self.credentials.profiles.get(profile)
    }

    /// The section of a profile in the configuration file.
    pub(super) fn in_config(&self, profile: &str) -> Option<&Section> {
        self.config.profiles.get(profile)
    }

    /// A section `[sso-session name]`.
    pub(super) fn sso_session(&self, name: &str) -> Option<&Section> {
        self.sso_sessions.get(name)
    }

    /// Names a profile, and the file that has the setting `name` of it.
    pub(super) fn origin(&self, profile: &str, name: &str) -> String {
        let is_in_credentials = self.in_credentials(profile).is_some_and(|section| section.contains_key(name));
        let file = if is_in_credentials { &self.credentials } else { &self.config };
        format!("profile {} in {}", sanitize(profile, 100), file.path.display())
    }

    /// The paths of both files.
    pub(super) fn files(&self) -> String {
        format!("{} or {}", self.config.path.display(), self.credentials.path.display())
    }

    /// The settings of the selected profile, other than its keys, as a configuration file of the SDK: its default profile.
    pub(super) fn text_for_sdk(&self) -> String {
        let mut text = String::new();
        for file in [&self.config, &self.credentials] {
            let section = file.profiles.get(&self.selected);
            section.into_iter().for_each(|section| write_section(&mut text, DEFAULT, section));
        }
        for (name, section) in &self.services {
            write_section(&mut text, &format!("services {name}"), section);
        }
        text
    }
}

/// Keys in files of earlier programs, which botocore still reads: that of `AWS_CREDENTIAL_FILE`, and the configuration of boto 2.
/// Returns the path of the file, and its section with lower-case names.
pub(super) fn legacy_files() -> Result<Vec<(PathBuf, Section)>, Refused> {
    let mut found = Vec::new();
    if let Ok(path) = std::env::var("AWS_CREDENTIAL_FILE") {
        let path = user_path(&path);
        let text = read(&path)?.unwrap_or_default();
        found.extend(
            parse(&format!("[-]\n{text}"))
                .map_err(|problem| invalid(&path, &problem))?
                .pop()
                .map(|(_, section)| (path, section)),
        );
    }
    let paths = match std::env::var("BOTO_CONFIG") {
        Ok(path) => vec![path],
        Err(_) => vec!["/etc/boto.cfg".to_owned(), "~/.boto".to_owned()],
    };
    for path in paths {
        let (path, sections) = sections_of(&path)?;
        found.extend(sections.into_iter().find(|(name, _)| name == "Credentials").map(|(_, section)| (path, section)));
    }
    Ok(found)
}

/// A path that may begin with `~`.
pub(super) fn user_path(path: &str) -> PathBuf {
    let relative = path.strip_prefix('~').filter(|rest| rest.is_empty() || rest.starts_with('/'));
    match relative.zip(std::env::home_dir()) {
        Some((rest, home)) => home.join(rest.trim_start_matches('/')),
        None => PathBuf::from(path),
    }
}

/// A path with the values of variables, written `$NAME` or `${NAME}`. Others than those of the environment stay.
fn with_variables(path: &str) -> String {
    let mut parts = path.split('$');
    let mut expanded = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let braced = part.strip_prefix('{').and_then(|rest| rest.split_once('}'));
        let end = part.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_').unwrap_or(part.len());
        let (name, rest) = braced.unwrap_or_else(|| part.split_at(end));
        match std::env::var(name) {
            Ok(value) if !name.is_empty() => expanded.extend([&value, rest]),
            _ => expanded.extend(["$", part]),
        }
    }
    expanded
}

type Sections = Vec<(String, Section)>;

/// The path and the sections of the file that a variable names, or of the usual one.
fn shared_file(variable: &str, usual: &str) -> Result<(PathBuf, Sections), Refused> {
    sections_of(&std::env::var(variable).unwrap_or_else(|_| usual.to_owned()))
}

/// The sections of a file; none if it does not exist.
fn sections_of(path: &str) -> Result<(PathBuf, Sections), Refused> {
    let path = user_path(&with_variables(path));
    let text = read(&path)?.unwrap_or_default();
    let sections = parse(&text).map_err(|problem| invalid(&path, &problem))?;
    Ok((path, sections))
}

fn read(path: &Path) -> Result<Option<String>, Refused> {
    match std::fs::read(path) {
        Ok(bytes) => String::from_utf8(bytes).map(Some).map_err(|_| invalid(path, "it is not UTF-8")),
        Err(error) => {
            // As botocore, which reads what it may read: the home of another user is common in containers.
            if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::IsADirectory) {
                log::warn!("{} cannot be read, its profiles are not used: {error}", path.display());
            }
            Ok(None)
        }
    }
}

fn invalid(path: &Path, problem: &str) -> Refused {
    let message = format!("no credentials: {}: {problem}", path.display());
    Refused { message, hint: Some("correct the file; settings are written name = value, below a [section]".to_owned()) }
}

/// The section whose settings all others have, unless they have their own; it is no profile (Python, `configparser.DEFAULTSECT`).
const DEFAULTS: &str = "DEFAULT";

/// The sections of an INI file, by the rules of Python's `RawConfigParser`. Messages contain no values.
fn parse(text: &str) -> Result<Sections, String> {
    let mut sections = Sections::new();
    // The setting that an indented line continues, and the indentation of its line.
    let (mut open, mut indent): (Option<String>, usize) = (None, 0);
    for (index, line) in text.lines().enumerate() {
        let problem = |what: &str| format!("line {}: {what}", index + 1);
        let content = line.trim();
        if content.starts_with(['#', ';']) {
            continue;
        }
        let current = open.as_ref().zip(sections.last_mut());
        let current = current.and_then(|(name, (_, section))| section.get_mut(name));
        let indented = line.len() - line.trim_start().len();
        match current {
            Some(value) if content.is_empty() => value.push('\n'),
            Some(value) if indented > indent => value.extend(["\n", content]),
            _ if content.is_empty() => {}
            _ => {
                indent = indented;
                if let Some(end) = content.rfind(']').filter(|end| content.starts_with('[') && *end > 1) {
                    let name = &content[1..end];
                    let section = match sections.iter().position(|(other, _)| other == name) {
                        Some(known) if name == DEFAULTS => sections.remove(known).1,
                        Some(_) => return Err(problem("the section exists already")),
                        None => Section::new(),
                    };
                    sections.push((name.to_owned(), section));
                    open = None;
                    continue;
                }
                let (_, section) = sections.last_mut().ok_or_else(|| problem("expected a [section]"))?;
                let (name, value) = content.split_once(['=', ':']).ok_or_else(|| problem("expected name = value"))?;
                let name = name.trim().to_lowercase();
                if name.is_empty() || section.contains_key(&name) {
                    return Err(problem("the name is empty, or exists already in this section"));
                }
                section.insert(name.clone(), value.trim().to_owned());
                open = Some(name);
            }
        }
    }
    for value in sections.iter_mut().flat_map(|(_, section)| section.values_mut()) {
        value.truncate(value.trim_end().len());
        let is_group = value.starts_with('\n');
        if is_group && value.lines().any(|line| !line.trim().is_empty() && !line.contains('=')) {
            return Err("expected name = value in an indented line".to_owned());
        }
    }
    if let Some(known) = sections.iter().position(|(name, _)| name == DEFAULTS) {
        let (_, defaults) = sections.remove(known);
        for (_, section) in &mut sections {
            for (name, value) in &defaults {
                section.entry(name.clone()).or_insert_with(|| value.clone());
            }
        }
    }
    Ok(sections)
}

/// The second of two words of a header; `None` if there are not two, as for botocore.
fn second_word(header: &str) -> Option<String> {
    words(header).filter(|words| words.len() == 2).map(|mut words| words.swap_remove(1))
}

/// The words of a text, which may be quoted as in a shell, by the rules of Python's `shlex.split`. `None` if a quotation is not
/// closed.
pub(super) fn words(text: &str) -> Option<Vec<String>> {
    let mut words: Vec<String> = Vec::new();
    let (mut quote, mut inside) = (None, false);
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        if quote.is_none() && matches!(letter, ' ' | '\t' | '\r' | '\n') {
            inside = false;
            continue;
        }
        if !inside {
            words.push(String::new());
            inside = true;
        }
        let word = words.last_mut()?;
        match (letter, quote) {
            (_, Some(open)) if letter == open => quote = None,
            ('\'' | '"', None) => quote = Some(letter),
            ('\\', None) => word.push(letters.next()?),
            ('\\', Some('"')) => {
                let next = letters.next()?;
                if !matches!(next, '"' | '\\') {
                    word.push('\\');
                }
                word.push(next);
            }
            _ => word.push(letter),
        }
    }
    quote.is_none().then_some(words)
}

fn write_section(text: &mut String, header: &str, section: &Section) {
    let _ = writeln!(text, "[{header}]");
    let is_name = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let is_key = |name: &str| ["aws_secret_access_key", "aws_session_token", "aws_security_token"].contains(&name);
    for (name, value) in section.iter().filter(|(name, _)| is_name(name) && !is_key(name)) {
        let mut lines = value.lines();
        let _ = writeln!(text, "{name} = {}", lines.next().unwrap_or_default());
        for line in lines.filter(|line| !line.trim().is_empty()) {
            let _ = writeln!(text, "  {line}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str, section: &str, name: &str) -> Option<String> {
        let sections = parse(text).unwrap();
        sections.into_iter().find(|(header, _)| header == section)?.1.remove(name)
    }

    #[test]
    fn settings_are_parsed_as_by_python() {
        let text = "# c\n[a]\nKey: v # w\nother=x\n  y\n\n; c\n[b] # c\n s3 =\n   a = 1\n   b=2\n key = = z\n";
        assert_eq!(value(text, "a", "key").unwrap(), "v # w");
        assert_eq!(value(text, "a", "other").unwrap(), "x\ny");
        assert_eq!(value(text, "b", "s3").unwrap(), "\na = 1\nb=2");
        assert_eq!(value(text, "b", "key").unwrap(), "= z");
        let text = "[DEFAULT]\na=1\nb=2\n[x]\nb=3\n[ x ]\n[DEFAULT]\nc=4\n";
        let of = |section| ["a", "b", "c"].map(|name| value(text, section, name));
        assert_eq!(of("x"), ["1", "3", "4"].map(|value| Some(value.to_owned())));
        assert_eq!(of(" x "), ["1", "2", "4"].map(|value| Some(value.to_owned())));
        assert_eq!(of("DEFAULT"), [None, None, None]);
        for broken in ["a = b", "[a]\nb", "[a]\n= b", "[a]\nb=1\nb=2", "[a]\n[a]", "[a]\ns =\n  canary", "[\nb"] {
            let problem = parse(broken).unwrap_err();
            assert!(!problem.contains("canary"), "{problem}");
        }
    }

    #[test]
    fn names_of_profiles_are_quoted_as_in_a_shell() {
        for (header, name) in [
            ("profile a", Some("a")),
            ("profile   \"x y\"", Some("x y")),
            ("profile 'x \"y'", Some("x \"y")),
            ("profile \"a\\\"b\\c\"", Some("a\"b\\c")),
            ("profile x\\ y", Some("x y")),
            ("profile a#b", Some("a#b")),
            ("profile x y", None),
            ("profile \"x", None),
            ("profile", None),
        ] {
            assert_eq!(second_word(header).as_deref(), name, "{header}");
        }
    }

    #[test]
    fn variables_and_the_home_are_expanded_in_paths() {
        let home = std::env::var("HOME").unwrap();
        assert_eq!(
            with_variables("$HOME/a/${HOME}b$/$NO_SUCH_VARIABLE"),
            format!("{home}/a/{home}b$/$NO_SUCH_VARIABLE")
        );
        assert_eq!(user_path("~/a"), Path::new(&home).join("a"));
        assert_eq!(user_path("~a/b"), Path::new("~a/b"));
    }
}
