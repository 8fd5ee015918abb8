//! Mistakes that a named test of the suite must find, on one server and in every kind.

use super::{Edit, TestMutant};

/// A forced release that grants the mutex to no waiter.
pub(super) const MUTEX_FORCE_WITHOUT_GRANT: Edit = Edit {
    file: "lua/mutex.lua",
    from: "      ok, state, why = pcall(grant_next, lock, queue, fence, attempt, call)\n",
    to: "      ok, state = true, nil\n      if not revoke_from then ok, state, why = pcall(grant_next, lock, queue, fence, attempt, call) end\n",
};

pub const TEST_MUTANTS: &[TestMutant] = &[
    TestMutant {
        name: "handed-over-renewed-by-ttl",
        edits: &[Edit {
            file: "src/lease/keeper.rs",
            from: "let pause = lease.span() / RENEWALS_PER_TTL;",
            to: "let pause = lease.options().ttl / RENEWALS_PER_TTL;",
        }],
        test: "suite::mutex_standalone_push_resp2::granted_lease_is_renewed_before_its_claim_ends",
    },
    TestMutant {
        name: "claim-trusted-without-renewal",
        edits: &[Edit {
            file: "src/lease/grant_clock.rs",
            from: "attempt.options.renewal == Renewal::Never || ",
            to: "",
        }],
        test: "suite::mutex_standalone_push_resp2::grant_lasts_whole_ttl_if_never_renewed",
    },
    TestMutant {
        name: "renewed-beyond-the-longest-hold",
        edits: &[Edit {
            file: "src/lease/lease.rs",
            from: "until.min(longest));\n        let extended",
            to: "until.max(longest.min(until)));\n        let extended",
        }],
        test: "lease::renewal::a_renewal_that_is_sent_late_does_not_exceed_max_hold",
    },
    TestMutant {
        name: "downgrade-counts-from-its-reply",
        edits: &[Edit {
            file: "src/lease/owned_lease.rs",
            from: "                let mut until = sent + attempt.trusted_span(attempt.options.ttl);",
            to: "                let sent = Moment::now();\n                let mut until = sent + attempt.trusted_span(attempt.options.ttl);",
        }],
        test: "suite::write_standalone_push_resp2::late_downgrade_reply_yields_no_longer_lease",
    },
    TestMutant {
        name: "inner-write-shortens-the-outer",
        edits: &[Edit {
            file: "lua/rwlock.lua",
            from: "    local ends = math.max(call.now + call.ttl_ms, write_ends)\n",
            to: "    local ends = call.now + call.ttl_ms\n",
        }],
        test: "suite::write_standalone_push_resp2::inner_write_keeps_larger_ttl",
    },
    TestMutant {
        name: "downgrade-shortens-the-outer-write",
        edits: &[Edit {
            file: "lua/rwlock.lua",
            from: "redis.call('HSET', lock.key, field, holds.ends .. ' ' .. owner .. holds.others)",
            to: "redis.call('HSET', lock.key, field, (call.ttl_ms and call.now + call.ttl_ms or holds.ends) .. ' ' .. owner .. holds.others)",
        }],
        test: "suite::write_standalone_push_resp2::downgrade_keeps_ttl_of_other_holds",
    },
    TestMutant {
        name: "downgrade-shortens-the-other-read",
        edits: &[Edit {
            file: "lua/rwlock.lua",
            from: "local hold = math.max(ends, reads.ends or 0) .. ' ' .. attempts",
            to: "local hold = ends .. ' ' .. attempts",
        }],
        test: "suite::write_standalone_push_resp2::downgrade_keeps_ttl_of_other_holds",
    },
    TestMutant {
        name: "mutex-force-grants-to-none",
        edits: &[MUTEX_FORCE_WITHOUT_GRANT],
        test: "suite::mutex_standalone_push_resp2::force_release_grants_at_once_to_waiter",
    },
    TestMutant {
        name: "reentrant-force-grants-to-none",
        edits: &[Edit {
            file: "lua/reentrant.lua",
            from: "      ok, state, why = pcall(grant_next, lock, queue, fence, fields, attempt, call)\n",
            to: "      ok, state = true, nil\n      if not revoke_from then ok, state, why = pcall(grant_next, lock, queue, fence, fields, attempt, call) end\n",
        }],
        test: "suite::reentrant_standalone_push_resp2::force_release_grants_at_once_to_waiter",
    },
    TestMutant {
        name: "write-force-grants-to-none",
        edits: &[Edit {
            file: "lua/rwlock.lua",
            from: "    call.work = call.work + answer\n  end\n  admit_next(lock, call)\n",
            to: "    call.work = call.work + answer\n  end\n  delete_if_free(lock)\n",
        }],
        test: "suite::write_standalone_push_resp2::force_release_grants_at_once_to_waiter",
    },
    TestMutant {
        name: "message-trusted-on-another-connection",
        edits: &[Edit {
            file: "src/lease/grant_clock.rs",
            from: "        if Some(*generation) != client.nodes.clock_generation()\n            || ",
            to: "        let _ = (generation, client.nodes.clock_generation()?);\n        if ",
        }],
        test: "standalone::wakeups::message_is_not_trusted_after_the_request_connection_was_replaced",
    },
    TestMutant {
        name: "message-trusted-on-another-subscription",
        edits: &[Edit {
            file: "src/lease/grant_clock.rs",
            from: "*subscription != client.wakeups.subscription()",
            to: "*subscription == Some(0)",
        }],
        test: "standalone::wakeups::message_is_not_trusted_after_the_subscription_was_replaced",
    },
    TestMutant {
        name: "waiters-not-woken-after-resubscribing",
        edits: &[Edit {
            file: "src/wire/subscriber.rs",
            from: "self.mailboxes.notify_all();\n",
            to: "let _: fn(&Mailboxes) = Mailboxes::notify_all;\n",
        }],
        test: "standalone::wakeups::waiters_poll_as_soon_as_a_broken_subscription_is_replaced",
    },
    TestMutant {
        name: "broken-subscription-noticed-by-heartbeat",
        edits: &[Edit {
            file: "src/wire/subscriber.rs",
            from: "                () = self.disconnected.notified() => return,\n",
            to: "                () = self.disconnected.notified() => {}\n",
        }],
        test: "standalone::wakeups::waiters_poll_as_soon_as_a_broken_subscription_is_replaced",
    },
    TestMutant {
        name: "old-local-hold-removes-the-new-one",
        edits: &[Edit {
            file: "src/lease/hold.rs",
            from: "        if holds.get(&self.key).is_some_and(|found| found.strong_count() == 0) {\n            holds.remove(&self.key);\n        }\n",
            to: "        holds.remove(&self.key);\n",
        }],
        test: "suite::reentrant_standalone_push_resp2::local_nesting_makes_no_round_trip",
    },
    TestMutant {
        name: "renewals-do-not-raise-the-minimum-token",
        edits: &[Edit {
            file: "src/lease/renewal.rs",
            from: "                nodes.node(node).observe(time.unsigned_abs());\n",
            to: "                let _ = (node, time);\n",
        }],
        test: "lease::renewal::renewals_raise_the_minimum_token_of_a_client",
    },
    TestMutant {
        name: "poll-cap-ignored",
        edits: &[Edit {
            file: "src/lease/lock_request.rs",
            from: "UNNOTIFIED_POLL.min(longest) }.min(self.options.poll_cap);",
            to: "UNNOTIFIED_POLL.min(longest) };",
        }],
        test: "standalone::wakeups::waiters_poll_every_poll_cap_or_most_of_a_claim",
    },
    TestMutant {
        name: "notified-waiter-polls-once-a-claim",
        edits: &[Edit {
            file: "src/lease/lock_request.rs",
            from: "if is_notified { 0.7 } else",
            to: "if is_notified { 1.0 } else",
        }],
        test: "standalone::wakeups::waiters_poll_every_poll_cap_or_most_of_a_claim",
    },
    TestMutant {
        name: "mutex-publishes-nothing",
        edits: &[Edit {
            file: "lua/mutex.lua",
            from: "        local receivers = redis.pcall('PUBLISH', channel,\n          waiter .. string.format(' %.0f ', token) .. call.now .. ' ' .. lock)\n",
            to: "        local receivers = 1\n",
        }],
        test: "suite::mutex_standalone_push_resp2::release_grants_at_once_to_waiter",
    },
    TestMutant {
        name: "read-write-lock-publishes-nothing",
        edits: &[Edit {
            file: "lua/rwlock.lua",
            from: "  local receivers = redis.pcall('PUBLISH', channel,\n    attempts .. string.format(' %.0f %.0f ', token, at) .. lock.key)\n",
            to: "  local receivers = 1\n",
        }],
        test: "suite::write_standalone_push_resp2::upgrade_succeeds_once_owner_is_sole_reader",
    },
    TestMutant {
        name: "waiter-sleeps-before-it-polls-again",
        edits: &[Edit {
            file: "src/lease/wait_loop.rs",
            from: "            self.queue().await;\n            return None;\n",
            to: "            self.queue().await;\n",
        }],
        test: "suite::mutex_standalone_push_resp2::waiter_finds_release_before_its_subscription",
    },
    TestMutant {
        name: "end-of-the-lease-not-waited-for",
        edits: &[Edit {
            file: "src/lease/wait_loop.rs",
            from: "(free_in + Duration::from_millis(1)).min(self.waiter.pause(self.waiter.polls))",
            to: "(free_in + self.waiter.longest_pause).min(self.waiter.longest_pause)",
        }],
        test: "suite::mutex_standalone_push_resp2::waiter_acquires_after_holder_expires",
    },
];
