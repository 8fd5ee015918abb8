//! The files of `--cacert`, `--cert` and `--key`.
//!
//! What is wrong with them is found before the program connects: the client library would take a CA
//! file without certificates for one that trusts no server, and another one's key for a failure of
//! the server.

use std::path::Path;

use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

use crate::exit::Failure;

/// Reads certificates, at least one.
pub(crate) fn read_certificates(file: &Path) -> Result<Vec<u8>, Failure> {
    let bytes = bytes_of(file)?;
    match chain(&bytes).is_empty() {
        true => Err(Failure::Usage(format!("{}: there is no certificate in PEM in it", file.display()))),
        false => Ok(bytes),
    }
}

/// Reads a certificate of this client, and its key.
pub(crate) fn read_client(file: &Path, key_file: &Path) -> Result<(Vec<u8>, Vec<u8>), Failure> {
    let unusable = |file: &Path, error: String| Failure::Usage(format!("{}: {error}", file.display()));
    let certificate = read_certificates(file)?;
    let key = bytes_of(key_file)?;
    let private_key = PrivateKeyDer::from_pem_slice(&key)
        .map_err(|_| unusable(key_file, "there is no private key in PEM in it".to_owned()))?;
    CertifiedKey::from_der(chain(&certificate), private_key, &default_provider()).map_err(
        |error| match error {
            rustls::Error::InconsistentKeys(_) => {
                unusable(key_file, format!("it is not the key of the certificate in {}", file.display()))
            }
            error => unusable(key_file, format!("the key or its certificate cannot be used: {error}")),
        },
    )?;
    Ok((certificate, key))
}

fn bytes_of(file: &Path) -> Result<Vec<u8>, Failure> {
    let unreadable = |error| Failure::Usage(format!("cannot read {}: {error}", file.display()));
    std::fs::read(file).map_err(unreadable)
}

/// The certificates of a file. What cannot be read as one is an error of the client library.
fn chain(bytes: &[u8]) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(bytes).filter_map(Result::ok).collect()
}
