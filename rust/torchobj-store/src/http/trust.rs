//! CA certificates that TLS trusts: a CA bundle, those of the system, or those of Mozilla if the system has none.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use crate::config::HttpConfig;

/// The TLS settings for `config`.
pub(super) fn tls_config(config: &HttpConfig) -> io::Result<Arc<ClientConfig>> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?;
    let config = if config.verify_tls {
        let roots = match &config.ca_bundle {
            Some(path) => bundle(path)?,
            None => system(),
        };
        builder.with_root_certificates(roots).with_no_client_auth()
    } else {
        builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AcceptAnyCertificate(provider)))
            .with_no_client_auth()
    };
    Ok(Arc::new(config))
}

fn bundle(path: &Path) -> io::Result<RootCertStore> {
    let explain = |problem: &dyn std::fmt::Display| {
        io::Error::new(io::ErrorKind::InvalidInput, format!("CA bundle {}: {problem}", path.display()))
    };
    let file = File::open(path).map_err(|error| explain(&error))?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_reader_iter(io::BufReader::new(file)) {
        roots.add(certificate.map_err(|error| explain(&error))?).map_err(|error| explain(&error))?;
    }
    if roots.is_empty() {
        return Err(explain(&"it contains no certificate"));
    }
    Ok(roots)
}

fn system() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    // Some certificates of a system cannot be parsed; they are skipped.
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        log::info!("the system has no CA certificates, using the built-in ones of Mozilla");
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    }
    roots
}

/// Accepts any certificate, for `verify_tls=False`. Still verifies the signatures of the handshake.
#[derive(Debug)]
struct AcceptAnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AcceptAnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
