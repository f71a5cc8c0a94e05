//! Test servers, started by `python -m tests.servers`. Dropping a server stops it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant, SystemTime};

use serde_json::Value;
use tokio::task::JoinSet;
use torchobj_core::client::Client;
use torchobj_core::policy::Policy;
use torchobj_store::config::{GcsConfig, S3Config};
use torchobj_store::credentials::{CredentialProvider, CredentialSender, CredentialSource, ProvidedCredentials};
use torchobj_store::gcs::{self, GcsStore};
use torchobj_store::s3::sign::{Canonical, Identity, Signer, Timestamp, UNSIGNED_PAYLOAD};
use torchobj_store::s3::{Account, S3Store};

/// Runs each of `futures` in a task of its own, because a request counts wakeups of its task as progress. Panics if one does.
pub(crate) async fn run_all(futures: impl IntoIterator<Item = impl Future<Output = ()> + Send + 'static>) {
    let mut tasks: JoinSet<()> = futures.into_iter().collect();
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
}

/// The shared credentials file of this process, named by its environment.
static CREDENTIALS_FILE: LazyLock<PathBuf> = LazyLock::new(|| {
    let file = std::env::temp_dir().join(format!("torchobj-credentials-{}", std::process::id()));
    // SAFETY: `set_var` excludes readers in Rust. Others, such as getaddrinfo, run in clients of servers, and the start of the
    // first server has set the variables before.
    #[expect(unsafe_code, reason = "the environment of a test process")]
    unsafe {
        std::env::set_var("AWS_SHARED_CREDENTIALS_FILE", &file);
        std::env::set_var("AWS_EC2_METADATA_DISABLED", "true");
    }
    file
});

/// A running server.
pub(crate) struct Server {
    process: Child,
    ready: Value,
}

impl Server {
    /// Starts `kind`, such as `strict` or `versitygw`.
    pub(crate) fn start(kind: &str, options: &[&str]) -> Self {
        LazyLock::force(&CREDENTIALS_FILE);
        let python = std::env::var("TORCHOBJ_PYTHON").unwrap_or_else(|_| "python3".into());
        let mut process = Command::new(python)
            .args(["-m", "tests.servers", "serve", kind])
            .args(options)
            // Compiling the modules takes longer than all else that a server does at its start.
            .env_remove("PYTHONDONTWRITEBYTECODE")
            .env("PYTHONPYCACHEPREFIX", concat!(env!("CARGO_TARGET_TMPDIR"), "/bytecode"))
            // At run time: the build directory is shared between checkouts, and the one that compiled this may be gone.
            .current_dir(Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../.."))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python starts");
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ready = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{kind} did not start: {line:?}"));
        Self { process, ready }
    }

    /// The S3 server of tests that change nothing but buckets of their own: no faults, limits or clock. It ends with
    /// the process.
    pub(crate) fn shared_strict() -> Arc<Self> {
        static SERVER: LazyLock<Arc<Server>> = LazyLock::new(|| Arc::new(Server::start("strict", &[])));
        SERVER.clone()
    }

    /// The same for Google Cloud Storage.
    pub(crate) fn shared_strict_gcs() -> Arc<Self> {
        static SERVER: LazyLock<Arc<Server>> = LazyLock::new(|| Arc::new(Server::start("strict-gcs", &[])));
        SERVER.clone()
    }

    pub(crate) fn text(&self, name: &str) -> &str {
        self.ready[name].as_str().unwrap_or_else(|| panic!("no {name} in {}", self.ready))
    }

    pub(crate) fn identity(&self) -> Identity {
        let of = |name| self.text(name).to_owned();
        Identity { access_key: of("access_key"), secret_key: of("secret_key"), session_token: None }
    }

    /// Writes or replaces a profile in the shared credentials file.
    pub(crate) fn set_profile(profile: &str, identity: &Identity) {
        static PROFILES: Mutex<BTreeMap<String, String>> = Mutex::new(BTreeMap::new());
        let mut profiles = PROFILES.lock().unwrap();
        let file = &*CREDENTIALS_FILE;
        let Identity { access_key, secret_key, session_token } = identity;
        let mut entry = format!("[{profile}]\naws_access_key_id={access_key}\naws_secret_access_key={secret_key}\n");
        entry.extend(session_token.iter().map(|token| format!("aws_session_token={token}\n")));
        profiles.insert(profile.to_owned(), entry);
        // By rename, because other tests read the file concurrently.
        let new = file.with_extension("new");
        std::fs::write(&new, profiles.values().map(String::as_str).collect::<String>()).unwrap();
        std::fs::rename(&new, file).unwrap();
    }

    /// A configuration for this server, with the credentials of a profile.
    pub(crate) fn config(&self) -> S3Config {
        let profile = self.text("access_key");
        Self::set_profile(profile, &self.identity());
        let endpoint_url = Some(self.text("endpoint").to_owned());
        S3Config { endpoint_url, profile: Some(profile.to_owned()), ..S3Config::default() }
    }

    /// A client for the new bucket `name`.
    pub(crate) fn bucket(&self, name: &str, config: S3Config, policy: Policy) -> Arc<Client> {
        self.create_bucket(name);
        self.client(name, config, policy)
    }

    /// A client for the bucket `name`.
    pub(crate) fn client(&self, name: &str, config: S3Config, policy: Policy) -> Arc<Client> {
        let account = Arc::new(Account::new(config).unwrap());
        Arc::new(Client::new(Arc::new(S3Store::new(account, name)), policy))
    }

    /// A configuration for this server of Google Cloud Storage.
    pub(crate) fn gcs_config(&self) -> GcsConfig {
        let endpoint_url = Some(self.text("endpoint").to_owned());
        let token = self.ready["token"].as_str().map(str::to_owned);
        let anonymous = token.is_none();
        let credential_provider = token.map(|token| CredentialProvider::new(Arc::new(StaticToken(token))));
        GcsConfig { endpoint_url, anonymous, credential_provider, ..GcsConfig::default() }
    }

    /// A client for the new bucket `name` of Google Cloud Storage.
    pub(crate) fn gcs_bucket(&self, name: &str, config: GcsConfig, policy: Policy) -> Arc<Client> {
        if self.ready["control"].is_string() {
            self.create_bucket(name);
        } else {
            let host = self.text("endpoint").split_once("://").unwrap().1;
            let headers = ["content-type: application/json".to_owned()];
            let body = format!(r#"{{"name":"{name}"}}"#);
            let response = exchange(host, "POST", "/storage/v1/b?project=test", &headers, &body);
            assert!(is_ok(&response), "create bucket {name}: {response}");
        }
        self.gcs_client(name, config, policy)
    }

    /// A client for the bucket `name` of Google Cloud Storage.
    pub(crate) fn gcs_client(&self, name: &str, config: GcsConfig, policy: Policy) -> Arc<Client> {
        let account = Arc::new(gcs::Account::new(config).unwrap());
        Arc::new(Client::new(Arc::new(GcsStore::new(account, name)), policy))
    }

    fn create_bucket(&self, name: &str) {
        if self.ready["control"].is_string() {
            self.control("POST", "buckets", &serde_json::json!({"name": name}));
            return;
        }
        let host = self.text("endpoint").split_once("://").unwrap().1;
        let time = Timestamp::new(SystemTime::now());
        let path = format!("/{name}");
        let headers = [("host", host), ("x-amz-content-sha256", UNSIGNED_PAYLOAD), ("x-amz-date", time.as_str())];
        let mut authorization = Vec::new();
        let canonical = Canonical { method: "PUT", path: path.as_bytes(), query: b"", headers: &headers };
        Signer::new(self.identity(), "us-east-1", "s3").authorize_into(&mut authorization, &time, &canonical);
        let mut lines: Vec<_> = headers.iter().map(|(name, value)| format!("{name}: {value}")).collect();
        lines.push(format!("authorization: {}", String::from_utf8(authorization).unwrap()));
        let response = exchange(host, "PUT", &path, &lines, "");
        assert!(is_ok(&response), "create bucket {name}: {response}");
    }

    /// Calls the control API of the strict server.
    pub(crate) fn control(&self, method: &str, path: &str, body: &Value) -> Value {
        let (host, base) = self.text("control").split_once("://").unwrap().1.split_once('/').unwrap();
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let response =
            exchange(host, method, &format!("/{base}/{path}"), &["content-type: application/json".into()], &body);
        let (head, json) = response.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200"), "{method} {path}: {response}");
        serde_json::from_str(json).unwrap()
    }

    /// Returns when the rule of faults with this index has chosen a request.
    pub(crate) async fn until_fired(&self, rule: usize) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.control("GET", "faults", &Value::Null)[rule]["fired"] == 0 {
            assert!(Instant::now() < deadline, "rule {rule} has not fired");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

struct StaticToken(String);

impl CredentialSource for StaticToken {
    fn id(&self) -> u64 {
        1
    }

    fn start(&self, sender: CredentialSender) {
        let token = Some(self.0.clone());
        let provided = ProvidedCredentials { access_key_id: None, secret_access_key: None, token, expires_at: None };
        let _ = sender.send(Ok(provided));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server exits at the end of its input.
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

/// Whether a response has status 200; some emulators speak HTTP/1.0.
fn is_ok(response: &str) -> bool {
    response.split(' ').nth(1) == Some("200")
}

fn exchange(host: &str, method: &str, path: &str, headers: &[String], body: &str) -> String {
    let mut socket = TcpStream::connect(host).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let headers: String =
        headers.iter().filter(|line| !line.starts_with("host:")).map(|line| format!("{line}\r\n")).collect();
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n"
    );
    socket.write_all(head.as_bytes()).unwrap();
    socket.write_all(body.as_bytes()).unwrap();
    let mut response = String::new();
    socket.read_to_string(&mut response).unwrap();
    response
}
