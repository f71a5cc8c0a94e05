//! Properties of manifests, and measurements.

use proptest::prelude::*;

use super::*;

fn version() -> impl Strategy<Value = Option<Version>> {
    let text = prop_oneof![
        "\"[0-9a-f]{32}\"",
        "\"[0-9a-f]{32}-[1-9][0-9]{0,3}\"",
        "\"[0-9A-F]{32}\"",
        "\"[0-9a-f]{32}-0[0-9]\"",
        "\"[0-9a-f]{32}-\\+[0-9]\"",
        "[0-9]{16}",
        ".{1,40}",
    ];
    proptest::option::of(text.prop_map(Version::new))
}

type Listed = Vec<(String, String, Option<u64>, Option<Version>)>;

fn objects() -> impl Strategy<Value = Listed> {
    let key = prop_oneof!["[^\n]{1,40}", "train/[0-9]{6}\\.jpg", "ü{1,3}[üä]{1,3}"];
    proptest::collection::vec(("s3://[a-c]", key, proptest::option::of(0..1u64 << 50), version()), 0..70)
}

fn manifest_of(objects: &Listed) -> Manifest {
    let mut manifest = Manifest::default();
    for (base, key, size, version) in objects {
        manifest.push(base, key, *size, version.as_ref());
    }
    manifest
}

/// `count` keys of 24 bytes in order, with sizes.
fn numbered(count: u64) -> Manifest {
    let mut manifest = Manifest::default();
    for index in 0..count {
        manifest.push("s3://bucket", &format!("train/{index:014}.jpg"), Some(100_000 + index % 1000), None);
    }
    manifest.shrink();
    manifest
}

/// `count` random keys of 24 bytes, with sizes and ETags of S3.
fn random(count: u64) -> Manifest {
    let mut random = fastrand::Rng::with_seed(7);
    let mut manifest = Manifest::default();
    for _ in 0..count {
        let key = format!("{:024x}", random.u128(..1 << 96));
        let etag = Version::new(format!("\"{:032x}\"", random.u128(..)));
        manifest.push("s3://bucket", &key, Some(random.u64(..1 << 20)), Some(&etag));
    }
    manifest.shrink();
    manifest
}

proptest! {
    #[test]
    fn pushed_objects_are_returned_before_and_after_serialization(objects in objects()) {
        let manifest = manifest_of(&objects);
        for manifest in [&manifest, &Manifest::from_bytes(&manifest.to_bytes()).unwrap()] {
            prop_assert_eq!(manifest.len(), objects.len());
            let iterated: Vec<_> = manifest.iter().collect();
            for (index, (base, key, size, version)) in objects.iter().enumerate() {
                let expected = ObjectInfo { base, key: key.clone(), size: *size, version: version.clone() };
                prop_assert_eq!(manifest.size(index), *size);
                prop_assert_eq!(&iterated[index], &expected);
                prop_assert_eq!(manifest.get(index), Some(expected));
            }
            prop_assert_eq!(manifest.get(objects.len()), None);
        }
    }

    #[test]
    fn appended_manifests_equal_one_of_all_objects(objects in objects(), cut in 0..70_usize) {
        let (head, tail) = objects.split_at(cut.min(objects.len()));
        let mut appended = manifest_of(&head.to_vec());
        appended.append(&manifest_of(&tail.to_vec()));
        let expected = manifest_of(&objects);
        prop_assert_eq!(appended.digest(), expected.digest());
        prop_assert!(appended == expected);
    }

    #[test]
    fn columns_of_any_division_have_the_same_objects(objects in objects(), cut in 0..70_usize) {
        let (manifest, cut) = (manifest_of(&objects), cut.min(objects.len()));
        let mut copy = Manifest::default();
        for range in [0..cut, cut..objects.len()] {
            let columns = manifest.columns(range).unwrap();
            copy.extend(manifest.bases(), &columns).unwrap();
        }
        prop_assert_eq!(copy.digest(), manifest.digest());
        prop_assert_eq!(manifest.columns(0..objects.len() + 1).map(|_| ()), None);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
        if let Some(manifest) = Manifest::from_bytes(&[b"s3://a\n\n".to_vec(), bytes].concat()) {
            prop_assert_eq!(manifest.iter().count(), manifest.len());
        }
    }

    #[test]
    fn arbitrary_columns_never_panic(offsets in proptest::collection::vec(-2..9_i32, 3), sizes in 0..17_usize) {
        let offsets: Vec<u8> = offsets.into_iter().flat_map(i32::to_le_bytes).collect();
        let columns = Columns {
            bases: vec![0; 8],
            key_offsets: offsets.clone(),
            keys: b"abcdef".to_vec(),
            sizes: vec![0; sizes],
            version_offsets: offsets,
            versions: b"abcdef".to_vec(),
        };
        let _ = Manifest::default().extend(&["s3://a".to_owned()], &columns);
    }
}

#[test]
fn a_numbered_key_of_24_bytes_with_a_size_takes_at_most_16_bytes() {
    let bytes = numbered(100_000).memory_bytes() as f64 / 100_000.0;
    assert!(bytes <= 16.0, "{bytes}");
}

#[test]
fn a_random_key_of_24_bytes_with_an_etag_takes_at_most_49_bytes() {
    let bytes = random(100_000).memory_bytes() as f64 / 100_000.0;
    assert!(bytes <= 49.0, "{bytes}");
}

#[test]
fn different_listings_have_different_digests() {
    let (mut one, mut two) = (Manifest::default(), Manifest::default());
    one.push("s3://b", "k", Some(1), None);
    two.push("s3://b", "k", Some(2), None);
    assert_ne!(one.digest(), two.digest());
    assert_eq!(one.digest(), one.clone().digest());
    assert_eq!(one.digest().len(), 32);
    let before = one.digest().to_owned();
    one.push("s3://b", "l", None, None);
    assert_ne!(one.digest(), before);
}

/// The state of a loader contains the digest: it must not depend on the version of torchobj.
#[test]
fn the_digest_is_the_sha256_of_the_serialized_form() {
    let mut manifest = Manifest::default();
    manifest.push("s3://b", "k", Some(1), Some(&Version::new("v")));
    assert_eq!(manifest.to_bytes(), b"s3://b\n\n\x06\x02\x00\x03\x01vk");
    assert_eq!(manifest.digest(), "4de08fabf9506d68460b58adb6dc6bd1");
}

#[cfg(target_os = "linux")]
mod shared {
    use std::os::fd::IntoRawFd;

    use super::*;

    fn received(manifest: &Manifest) -> Manifest {
        let file = manifest.file().unwrap().try_clone_to_owned().unwrap().into_raw_fd();
        Manifest::received(file, manifest.bases().to_vec(), manifest.digest().to_owned()).unwrap()
    }

    #[test]
    fn a_received_manifest_equals_that_of_the_sender() {
        let private = random(50_000);
        let mut manifest = private.clone();
        manifest.share();
        let copy = received(&manifest);
        assert!(manifest == private && copy == private);
        assert_eq!(copy.digest(), private.digest());
        assert_eq!(copy.get(33_333), private.get(33_333));
        assert!(copy.iter().eq(private.iter()));
        assert!(manifest.memory_bytes() <= private.memory_bytes() + 16);
    }

    #[test]
    fn an_object_can_be_added_to_a_shared_manifest() {
        let (mut manifest, mut expected) = (numbered(100_003), numbered(100_003));
        manifest.share();
        for manifest in [&mut manifest, &mut expected] {
            manifest.push("s3://bucket", "train/x", Some(1), None);
        }
        assert!(manifest.file().is_none() && manifest == expected);
    }

    #[test]
    fn a_small_manifest_stays_private() {
        let mut manifest = numbered(100);
        manifest.share();
        assert!(manifest.file().is_none());
    }

    #[test]
    fn files_that_are_not_manifests_are_refused() {
        use std::io::Write;

        use crate::buffer::SealedFile;

        let word = u64::from_le_bytes(*b"tobjman1");
        for words in [vec![0], vec![word], vec![word, u64::MAX], vec![word, 1], vec![0, 0, 0]] {
            let mut file = SealedFile::unsealed("test").unwrap();
            words.iter().for_each(|word: &u64| file.write_all(&word.to_le_bytes()).unwrap());
            let file = SealedFile::seal(file).unwrap().file().try_clone_to_owned().unwrap();
            assert!(Manifest::received(file.into_raw_fd(), vec![], String::new()).is_err(), "{words:?}");
        }
        let mut file = SealedFile::unsealed("test").unwrap();
        [word, 2, 900, 7].iter().for_each(|word: &u64| file.write_all(&word.to_le_bytes()).unwrap());
        let file = SealedFile::seal(file).unwrap().file().try_clone_to_owned().unwrap();
        let manifest = Manifest::received(file.into_raw_fd(), vec![], String::new()).unwrap();
        assert_eq!((manifest.get(0), manifest.get(1), manifest.iter().count()), (None, None, 0));
    }
}

/// CPU time of this thread in nanoseconds: other processes do not count.
#[cfg(target_os = "linux")]
fn cpu_ns() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    stat.split(' ').next().unwrap().parse().unwrap()
}

/// Run it with `--release -- --ignored --nocapture`.
#[cfg(target_os = "linux")]
#[test]
#[ignore = "prints measurements of ten million objects"]
#[expect(clippy::print_stderr, reason = "prints measurements")]
fn access_by_index_takes_less_than_a_microsecond() {
    for (name, mut manifest) in [("numbered", numbered(10_000_000)), ("random with ETags", random(10_000_000))] {
        manifest.share();
        let mut random = fastrand::Rng::with_seed(1);
        let start = cpu_ns();
        let lengths: usize =
            (0..1_000_000).map(|_| manifest.get(random.usize(..manifest.len())).unwrap().key.len()).sum();
        assert_eq!(lengths, 24_000_000);
        let (access_ns, bytes) = ((cpu_ns() - start) / 1_000_000, manifest.memory_bytes() as f64 / 1e7);
        let start = cpu_ns();
        let digest = manifest.digest();
        let hash_ms = (cpu_ns() - start) / 1_000_000;
        eprintln!("{name}: {access_ns} ns per access, {bytes:.1} bytes per key, digest {digest} in {hash_ms} ms");
    }
}
