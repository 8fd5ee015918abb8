//! Mistakes of the client that a named test of the suite must find: in its results, its waiting,
//! and its logs and errors.

use super::{Edit, TestMutant};

/// An edit of a text that occurs once.
pub(super) const fn edit(file: &'static str, from: &'static str, to: &'static str) -> Edit {
    Edit { file, from, to }
}

pub const CLIENT_TEST_MUTANTS: &[TestMutant] = &[
    TestMutant {
        name: "held-by-any-owner",
        edits: &[edit(
            "src/rwlock.rs",
            "let owner = Some(holder_id.owner());",
            "let owner = Some(holder_id.owner()).filter(|owner| owner.is_empty());",
        )],
        test: "inspection::holders::is_held_by_accepts_a_lease_or_an_owner_on_every_kind",
    },
    TestMutant {
        name: "lost-reply-of-a-release-counts-as-not-held",
        edits: &[edit(
            "src/lease/release.rs",
            "let may_have_released = if is_final {",
            "let may_have_released = if is_final || votes.deployment.nodes > 0 {",
        )],
        test: "suite::mutex_standalone_push_resp2::acquire_counts_once_if_its_reply_is_lost",
    },
    TestMutant {
        name: "holder-not-announced-to-tasks-of-its-owner",
        edits: &[edit(
            "src/lease/wait_loop.rs",
            "if let Some(front) = self.front.as_ref().filter(|_| !self.announced.is_some_and(is_known))",
            "if let Some(front) = self.front.as_ref().filter(|_| false && self.announced.is_some_and(is_known))",
        )],
        test: "suite::reentrant_standalone_push_resp2::queued_owner_reenters_after_acquiring_elsewhere",
    },
    TestMutant {
        name: "unconfirmed-grant-kept-from-others",
        edits: &[edit(
            "src/lease/wait_loop.rs",
            "if failure.replicas().is_some() {",
            "if failure.replicas().is_some() && self.waiter.guard.entry.is_none() {",
        )],
        test: "replicas::grants::replicas_missed_by_a_waiter_leave_the_lock_to_the_next",
    },
    TestMutant {
        name: "siblings-of-a-lost-lease-sought-among-all",
        edits: &[edit(
            "src/lease/kept_leases.rs",
            "let places = owner_of(lease).and_then(|owner| self.by_owner.get(&owner)).into_iter().flatten();",
            "let own = owner_of(lease);\n        let places = self.by_owner.iter().filter(move |(other, _)| own.as_ref() == Some(*other)).flat_map(|(_, places)| places);",
        )],
        test: "lease::renewal::reentrant_standalone_ten_thousand_losses_are_noticed_as_fast_as_of_mutexes",
    },
    TestMutant {
        name: "short-leases-wait-long-between-renewals",
        edits: &[edit(
            "src/lease/renewal.rs",
            "let pause = (lease.span() / 30).min(LONGEST_RENEWAL_PAUSE);",
            "let pause = (lease.span() / 30).max(Duration::from_millis(50)).min(LONGEST_RENEWAL_PAUSE);",
        )],
        test: "lease::renewal::leases_of_100_ms_survive_one_slow_renewal",
    },
    TestMutant {
        name: "limit-of-zero-tries-nothing",
        edits: &[edit(
            "src/lease/acquire.rs",
            "Some(limit @ Duration::ZERO) = limit",
            "Some(limit @ Duration::MAX) = limit",
        )],
        test: "standalone::time_limits::lock_timeout_of_zero_tries_once",
    },
    TestMutant {
        name: "revoked-lease-reported-as-lost",
        edits: &[edit(
            "src/lease/renewal.rs",
            "self.lose(schedule, lease, LeaseEnd::Revoked, reports);",
            "self.lose(schedule, lease, LeaseEnd::Lost, reports);",
        )],
        test: "lease::end::lease_end_is_revoked_after_force_release",
    },
    TestMutant {
        name: "subscriber-not-verified",
        edits: &[edit(
            "src/locks/builder.rs",
            "verify: self.subscriber.is_some(),",
            "verify: self.subscriber.is_some() && labels.joint_name().is_some(),",
        )],
        test: "locks::builder::subscriber_of_another_server_is_refused",
    },
    TestMutant {
        name: "outage-logged-for-each-failure",
        edits: &[edit(
            "src/wire/outage.rs",
            "Some(lack) => lack.seen = now,\n",
            "Some(lack) => { lack.seen = now; reports.push(self.failing(failure)); }\n",
        )],
        test: "logs::outage_is_logged_once_when_it_starts_and_once_when_it_ends",
    },
    TestMutant {
        name: "section-resets-what-it-does-not-name",
        edits: &[edit(
            "src/options/partial.rs",
            "let mut all = base.clone();",
            "let mut all = Options { set_fields: base.set_fields, ..Options::new() };",
        )],
        test: "options::options_of_a_section_override_only_the_named_ones",
    },
    TestMutant {
        name: "outage-limit-ignored",
        edits: &[edit("src/lease/progress.rs", "unqueued: limit.unwrap_or(unqueued),", "unqueued,")],
        test: "options::outage_limit_bounds_how_long_a_call_retries",
    },
    TestMutant {
        name: "evicting-server-accepted-in-silence",
        edits: &[edit(
            "src/wire/handshake.rs",
            "(finding.check == Check::Eviction\n                            || finding.check",
            "(finding.check",
        )],
        test: "locks::doctor::doctor_warning_is_logged_once_when_a_client_connects",
    },
    TestMutant {
        name: "doctor-blames-rights-for-a-wrong-password",
        edits: &[edit(
            "src/locks/doctor.rs",
            "if findings.iter().any(Finding::is_usable) {",
            "if !findings.is_empty() {",
        )],
        test: "locks::doctor::doctor_reports_only_the_password_if_it_is_wrong",
    },
    TestMutant {
        name: "requests-of-many-tasks-not-combined",
        edits: &[Edit {
            file: "src/wire/request.rs",
            from: "call.len() < MAX_LOCKS && requests",
            to: "call.len() < MAX_LOCKS.min(1) && requests",
        }],
        test: "standalone::combined_requests::many_tasks_share_script_calls",
    },
    TestMutant {
        name: "renewals-of-many-leases-not-combined",
        edits: &[Edit {
            file: "src/wire/request.rs",
            from: "&& one.name == two.name\n",
            to: "&& one.name == two.name\n            && !one.name.ends_with(\"renew\")\n",
        }],
        test: "standalone::combined_requests::renewals_of_many_leases_share_script_calls",
    },
    TestMutant {
        name: "error-of-one-lock-is-an-answer",
        edits: &[Edit {
            file: "src/wire/request.rs",
            from: "answers.into_iter().map(|answer| error_in(&answer).map_or(Ok(answer), Err)).collect()",
            to: "answers.into_iter().map(|answer| error_in(&answer).map_or(Ok(answer), |_| Ok(Value::Int(0)))).collect()",
        }],
        test: "standalone::combined_requests::one_locks_outcome_is_not_anothers",
    },
    TestMutant {
        name: "forbidden-lock-refuses-its-whole-call",
        edits: &[Edit {
            file: "src/wire/request.rs",
            from: "ServerErrorKind::NoPerm) && was_refused(error)",
            to: "ServerErrorKind::NoPerm) && !was_refused(error)",
        }],
        test: "standalone::combined_requests::lack_of_rights_for_one_lock_is_not_anothers",
    },
    TestMutant {
        name: "free-lock-taken-ahead-of-its-waiters",
        edits: &[Edit {
            file: "lua/mutex.lua",
            from: "redis.call('EXISTS', lock, KEYS[n + i]) == 0",
            to: "redis.call('EXISTS', lock) == 0",
        }],
        test: "scripts::vectors::vectors_get_their_answers",
    },
    TestMutant {
        name: "lock-with-waiters-released-without-a-grant",
        edits: &[Edit {
            file: "lua/mutex.lua",
            from: "local is_plain = not has_more and redis.call('EXISTS', unpack(KEYS, n + 1, 2 * n)) == 0",
            to: "local is_plain = not has_more",
        }],
        test: "scripts::vectors::vectors_get_their_answers",
    },
];
