//! Decides whose credentials sign requests, in the order of botocore (`create_credential_resolver`). Reads the environment and
//! the shared configuration files only; `credentials` loads what is decided here.
//!
//! A source that is configured is the one: if it fails, no other follows it.

use std::path::PathBuf;

use super::profiles::{Profiles, Section, legacy_files, user_path, words};
use super::sign::Identity;
use crate::credentials::Refused;
use crate::env;
use crate::http::sanitize;

/// Where credentials come from. Without `Debug`, because it has secrets.
pub(super) enum Source {
    /// Keys of the environment or of a file.
    Keys(Identity),
    /// A role that is assumed with the credentials of another source.
    Role { base: Box<Source>, role: Role },
    /// A role that is assumed with the token in a file.
    WebIdentity { token_file: PathBuf, role_arn: String, session_name: Option<String> },
    /// A role of IAM Identity Center.
    Sso { session: Option<String>, region: String, start_url: String, account_id: String, role_name: String },
    /// The words of a `credential_process`.
    Process(Vec<String>),
    /// The credential service of a container.
    Container,
    /// The metadata service of the machine.
    Instance,
}

/// The settings of an assumed role.
pub(super) struct Role {
    pub(super) arn: String,
    pub(super) session_name: Option<String>,
    pub(super) external_id: Option<String>,
    pub(super) duration_s: Option<u64>,
}

/// A source, and what it is called in messages: without secrets.
pub(super) struct Found {
    pub(super) source: Source,
    pub(super) name: String,
    /// The next step if it fails.
    pub(super) hint: Option<String>,
}

impl Found {
    fn new(source: Source, name: String) -> Self {
        Self { source, name, hint: None }
    }
}

type Lookup = Result<Option<Found>, Refused>;

/// The source of the selected profile and of the environment. A profile that the caller named excludes the keys and the web
/// identity of the environment.
///
/// # Errors
/// A source is configured incompletely, or needs a code or a login that only a user can enter.
pub(super) fn find(profiles: &Profiles) -> Result<Found, Refused> {
    let (selected, explicit) = (profiles.selected(), profiles.is_explicit());
    if !explicit && let Some(found) = environment_keys()? {
        return Ok(found);
    }
    if let Some(found) = assumed_role(profiles, selected, &mut vec![selected.to_owned()])? {
        return Ok(found);
    }
    if let Some(found) = of_profile(profiles, selected, !explicit)? {
        return Ok(found);
    }
    for (path, section) in legacy_files()? {
        let names = [("awsaccesskeyid", "awssecretkey"), ("aws_access_key_id", "aws_secret_access_key")];
        if let Some(names) = names.into_iter().find(|(id, _)| section.contains_key(*id)) {
            return keys_of(&section, names, path.display().to_string());
        }
    }
    if let Some(found) = container() {
        return Ok(found);
    }
    Ok(Found::new(Source::Instance, "the role of this machine".to_owned()))
}

fn refused<T>(message: String, hint: &str) -> Result<T, Refused> {
    Err(Refused { message: format!("no credentials: {message}"), hint: (!hint.is_empty()).then(|| hint.to_owned()) })
}

fn environment_keys() -> Lookup {
    const ID: &str = "AWS_ACCESS_KEY_ID";
    const SECRET: &str = "AWS_SECRET_ACCESS_KEY";
    let Some((_, access_key)) = env::first_of(&[ID]) else { return Ok(None) };
    let Some((_, secret_key)) = env::first_of(&[SECRET]) else {
        return refused(format!("{ID} is set, and {SECRET} is not"), "set both, or unset both");
    };
    // As botocore, which has kept the name that boto 2 used.
    let token = env::first_of(&["AWS_SECURITY_TOKEN", "AWS_SESSION_TOKEN"]);
    let with = token.as_ref().map_or("without AWS_SESSION_TOKEN".to_owned(), |(name, _)| format!("with {name}"));
    let name = format!("{ID} and {SECRET}, {with}{}", shown_id(&access_key));
    let session_token = token.map(|(_, token)| token.trim().to_owned());
    Ok(Some(Found::new(Source::Keys(Identity { access_key, secret_key, session_token }), name)))
}

/// The last letters of an access key id, as `aws configure list` shows it. Those of other stores may be names of users.
fn shown_id(access_key: &str) -> String {
    let is_long = access_key.len() >= 16 && access_key.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if is_long { format!(" (access key id ...{})", &access_key[access_key.len() - 4..]) } else { String::new() }
}

/// The keys in a section with these names.
fn keys_of(section: &Section, (id, secret): (&str, &str), origin: String) -> Result<Found, Refused> {
    let value = |name: &str| section.get(name).filter(|value| !value.is_empty()).cloned();
    let (Some(access_key), Some(secret_key)) = (value(id), value(secret)) else {
        let missing = if value(id).is_none() { id } else { secret };
        return refused(format!("{origin}: {missing} is missing or empty"), "`aws configure` writes both");
    };
    let token = ["aws_security_token", "aws_session_token"].into_iter().find_map(|name| section.get(name));
    let name = format!("{origin}: keys{}", shown_id(&access_key));
    let session_token = token.filter(|token| !token.is_empty()).cloned();
    Ok(Found::new(Source::Keys(Identity { access_key, secret_key, session_token }), name))
}

fn container() -> Option<Found> {
    // Empty ones count too: the container service is then an error, as it is for botocore.
    const VARIABLES: [&str; 2] = ["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"];
    let variable = VARIABLES.into_iter().find(|name| std::env::var_os(name).is_some())?;
    let token = env::first_of(&["AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"]);
    let with = token.map_or_else(String::new, |(name, path)| format!(", with {name}={}", sanitize(&path, 300)));
    Some(Found::new(Source::Container, format!("the container's credential service ({variable}{with})")))
}

/// The role of a profile that is assumed with the credentials of another one, or of a named source.
fn assumed_role(profiles: &Profiles, profile: &str, visited: &mut Vec<String>) -> Lookup {
    let get = |name| profiles.get(profile, name);
    let (Some(arn), None) = (get("role_arn"), get("web_identity_token_file")) else { return Ok(None) };
    let origin = profiles.origin(profile, "role_arn");
    let base = match (get("source_profile"), get("credential_source")) {
        (Some(_), Some(_)) => {
            return refused(format!("{origin} has both source_profile and credential_source"), "remove one");
        }
        (None, None) => {
            return refused(
                format!("{origin} has a role_arn without source_profile or credential_source"),
                "set one of them",
            );
        }
        (None, Some(source)) => named_source(&origin, source)?,
        (Some(source), None) => source_profile(profiles, profile, source, &origin, visited)?,
    };
    if let Some(device) = get("mfa_serial") {
        let device = sanitize(device, 100);
        let message = format!("{origin}: the role needs a code of mfa_serial={device}, and torchobj asks for none");
        let hint = format!(
            "set the variables of `aws configure export-credentials --profile {} --format env`, which asks for it, or pass a \
             credential_provider",
            quoted(profile)
        );
        return refused(message, &hint);
    }
    let arn = arn.to_owned();
    let name = format!("{origin}: role {}, assumed with {}", sanitize(&arn, 200), base.name);
    let role = Role {
        arn,
        session_name: get("role_session_name").map(str::to_owned),
        external_id: get("external_id").map(str::to_owned),
        duration_s: get("duration_seconds").and_then(|seconds| seconds.trim().parse().ok()),
    };
    let hint = base.hint.or_else(|| Some("check the trust policy of the role, and the keys that assume it".to_owned()));
    Ok(Some(Found { source: Source::Role { base: Box::new(base.source), role }, name, hint }))
}

fn named_source(origin: &str, source: &str) -> Result<Found, Refused> {
    let found = match source.to_ascii_lowercase().as_str() {
        "environment" => environment_keys()?,
        "ecscontainer" => container(),
        "ec2instancemetadata" => Some(Found::new(Source::Instance, "the role of this machine".to_owned())),
        _ => {
            let source = sanitize(source, 100);
            let hint = "it must be Environment, EcsContainer or Ec2InstanceMetadata";
            return refused(format!("{origin}: credential_source={source}: not a source of credentials"), hint);
        }
    };
    match found {
        Some(found) => Ok(found),
        None => {
            refused(format!("{origin}: credential_source={source} has no credentials"), "set its environment variables")
        }
    }
}

fn source_profile(
    profiles: &Profiles,
    profile: &str,
    source: &str,
    origin: &str,
    visited: &mut Vec<String>,
) -> Result<Found, Refused> {
    let shown = sanitize(source, 100);
    if !profiles.exists(source) {
        return refused(
            format!("{origin}: source_profile={shown} does not exist in {}", profiles.files()),
            "correct its name",
        );
    }
    let has_keys =
        ["aws_access_key_id", "aws_secret_access_key"].iter().any(|name| profiles.get(source, name).is_some());
    // A profile may be its own source, with its keys.
    if visited.iter().any(|name| name == source) && !(source == profile && has_keys) {
        return refused(
            format!("{origin}: source_profile={shown} leads back to itself"),
            "name a profile with credentials",
        );
    }
    visited.push(source.to_owned());
    if !has_keys && let Some(found) = assumed_role(profiles, source, visited)? {
        return Ok(found);
    }
    match of_profile(profiles, source, false)? {
        Some(found) => Ok(found),
        None => {
            refused(format!("{origin}: source_profile={shown} has no credentials"), "name a profile with credentials")
        }
    }
}

/// The credentials of a profile other than a role that is assumed with those of another one. `environment`: whether variables
/// of a web identity apply.
fn of_profile(profiles: &Profiles, profile: &str, environment: bool) -> Lookup {
    let get = |name| profiles.get(profile, name);
    if let Some(found) = web_identity(profiles, profile, environment)? {
        return Ok(Some(found));
    }
    if get("sso_account_id").is_some() || get("sso_role_name").is_some() {
        return sso(profiles, profile).map(Some);
    }
    const KEYS: (&str, &str) = ("aws_access_key_id", "aws_secret_access_key");
    let keys = |section: Option<&Section>| match section.filter(|section| section.contains_key(KEYS.0)) {
        Some(section) => keys_of(section, KEYS, profiles.origin(profile, KEYS.0)).map(Some),
        None => Ok(None),
    };
    if let Some(found) = keys(profiles.in_credentials(profile))? {
        return Ok(Some(found));
    }
    if get("login_session").is_some() {
        let hint = format!(
            "set the variables of `aws configure export-credentials --profile {} --format env`, or pass a credential_provider",
            quoted(profile)
        );
        let origin = profiles.origin(profile, "login_session");
        return refused(format!("{origin}: a login_session of `aws login` cannot be used"), &hint);
    }
    if let Some(command) = get("credential_process") {
        let origin = profiles.origin(profile, "credential_process");
        // Without a shell, as botocore.
        let Some(command) = words(command).filter(|command| !command.is_empty()) else {
            return refused(
                format!("{origin}: credential_process is empty, or a quotation in it is not closed"),
                "write a program and its arguments, quoted as in a shell",
            );
        };
        let mut found = Found::new(Source::Process(command), format!("{origin}: credential_process"));
        found.hint =
            Some("run the command, which has no shell and receives no input, and correct what it reports".to_owned());
        return Ok(Some(found));
    }
    keys(profiles.in_config(profile))
}

fn web_identity(profiles: &Profiles, profile: &str, environment: bool) -> Lookup {
    // A variable that is set takes precedence, even if it is empty.
    let setting = |variable: &str, name: &str| {
        let set = environment.then(|| std::env::var(variable).ok()).flatten();
        set.or_else(|| profiles.get(profile, name).map(str::to_owned))
    };
    const VARIABLE: &str = "AWS_WEB_IDENTITY_TOKEN_FILE";
    let token_file = setting(VARIABLE, "web_identity_token_file").filter(|path| !path.is_empty());
    let Some(token_file) = token_file else { return Ok(None) };
    let is_variable = environment && std::env::var_os(VARIABLE).is_some();
    let origin = if is_variable { VARIABLE.to_owned() } else { profiles.origin(profile, "web_identity_token_file") };
    let Some(role_arn) = setting("AWS_ROLE_ARN", "role_arn").filter(|arn| !arn.is_empty()) else {
        return refused(
            format!("{origin}: a web identity token without a role"),
            "set AWS_ROLE_ARN, or role_arn in the profile",
        );
    };
    let shown = (sanitize(&token_file, 300), sanitize(&role_arn, 200));
    let name = format!("{origin}: role {}, assumed with the web identity token {}", shown.1, shown.0);
    let session_name = setting("AWS_ROLE_SESSION_NAME", "role_session_name").filter(|name| !name.is_empty());
    let hint = Some("check that the file can be read, and the trust policy of the role".to_owned());
    let source = Source::WebIdentity { token_file: user_path(&token_file), role_arn, session_name };
    Ok(Some(Found { source, name, hint }))
}

fn sso(profiles: &Profiles, profile: &str) -> Result<Found, Refused> {
    let session = profiles.get(profile, "sso_session");
    let origin = profiles.origin(profile, "sso_role_name");
    let of_session = match session.map(|name| (name, profiles.sso_session(name))) {
        Some((name, None)) => {
            let name = sanitize(name, 100);
            return refused(format!("{origin}: sso_session={name} does not exist"), "`aws configure sso` writes it");
        }
        Some((_, section)) => section,
        None => None,
    };
    let setting = |name: &str| {
        let (own, shared) =
            (profiles.get(profile, name), of_session.and_then(|section| section.get(name)).map(String::as_str));
        match (own, shared) {
            (Some(own), Some(shared)) if own != shared => {
                refused(format!("{origin}: {name} differs from that of its sso-session"), "remove one of them")
            }
            (None, None) => refused(format!("{origin}: {name} is missing"), "`aws configure sso` writes it"),
            _ => Ok(own.or(shared).unwrap_or_default().to_owned()),
        }
    };
    let (account_id, role_name) = (setting("sso_account_id")?, setting("sso_role_name")?);
    let name = format!("{origin}: SSO, role {} of account {}", sanitize(&role_name, 100), sanitize(&account_id, 100));
    let hint = format!("`aws sso login --profile {}`; then check sso_account_id and sso_role_name", quoted(profile));
    let (region, start_url) = (setting("sso_region")?, setting("sso_start_url")?);
    let source = Source::Sso { session: session.map(str::to_owned), region, start_url, account_id, role_name };
    Ok(Found { source, name, hint: Some(hint) })
}

/// The name of a profile in a command.
fn quoted(profile: &str) -> String {
    let profile = sanitize(profile, 100);
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-/.%@:+".contains(&byte);
    if !profile.is_empty() && profile.bytes().all(plain) {
        profile
    } else {
        format!("'{}'", profile.replace('\'', r"'\''"))
    }
}
