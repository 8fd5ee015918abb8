//! The mistakes that the judge must find.

use super::{Edit, Mutant, Setting};
use crate::support::Topology::{Cluster, Quorum3, Standalone};

/// For mistakes that are found soon if requests are sent again.
const RESENT: Setting =
    Setting { topology: Standalone, seconds: 15, linger: 200, faults: &["reset", "script-flush"] };

/// For mistakes of a quorum whose minority is away.
const MINORITY: Setting =
    Setting { topology: Quorum3, seconds: 20, linger: 200, faults: &["minority", "reset"] };

/// For mistakes of leases that are renewed, or that have expired.
const LINGERING: Setting =
    Setting { topology: Standalone, seconds: 20, linger: 20, faults: &["worker-stopped"] };

/// For mistakes that are found if the server loses locks that are held.
const FORGOTTEN: Setting = Setting { topology: Standalone, seconds: 20, linger: 10, faults: &["flushall"] };

/// For mistakes of renewed leases while a minority is away.
const OUTLASTED: Setting =
    Setting { topology: Quorum3, seconds: 30, linger: 10, faults: &["minority", "node-emptied"] };

/// A script that counts each waiter as alive, however long it was not seen.
const fn with_dead_waiters(file: &'static str, times: usize) -> Edit {
    Edit {
        file,
        from: "if math.abs(time - waiter_place) < ms * 1000 then return true end",
        times,
        to: "if waiter_place then return true end",
    }
}

/// Each mistake is as small as a real one.
pub const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "release-without-holder-check",
        edits: &[Edit {
            file: "lua/mutex/release.lua",
            from: "if holder ~= attempt then return answer(0) end",
            times: 1,
            to: "if not holder then return answer(0) end",
        }],
        setting: RESENT,
        rules: &["exclusion"],
    },
    Mutant {
        name: "acquire-of-a-held-lock",
        edits: &[Edit {
            file: "lua/mutex/acquire.lua",
            from: "if holder and holder ~= attempt then\n  queue(place or time, 0, scores)\n  return {pttl, time}\nend\n",
            times: 1,
            to: "",
        }],
        setting: RESENT,
        rules: &["exclusion"],
    },
    Mutant {
        name: "validity-from-the-reply",
        edits: &[
            Edit {
                file: "src/lease/acquire_round.rs",
                from: "let Some(sent) = tally.granted_since else",
                times: 1,
                to: "let Some(sent) = tally.granted_since.map(|_| Moment::now()) else",
            },
            Edit {
                file: "src/lease/renewal.rs",
                from: "        let (mut gone, mut degraded) =",
                times: 1,
                to: "        let sent = Moment::now();\n        let (mut gone, mut degraded) =",
            },
        ],
        setting: Setting { topology: Standalone, seconds: 25, linger: 20, faults: &["slow", "replies-held"] },
        rules: &["deadline", "exclusion", "backing"],
    },
    Mutant {
        name: "renewal-revives-a-lost-lock",
        edits: &[Edit {
            file: "lua/mutex/renew.lua",
            from: "if holder ~= attempt then return 0 end\nredis.call('PEXPIRE', KEYS[1], ttl_ms)",
            times: 1,
            to: "redis.call('SET', KEYS[1], attempt, 'PX', ttl_ms)",
        }],
        setting: FORGOTTEN,
        rules: &["bounded loss", "exclusion", "release"],
    },
    Mutant {
        name: "half-is-a-majority",
        edits: &[Edit { file: "src/deployment.rs", from: "nodes / 2 + 1", times: 1, to: "nodes / 2" }],
        setting: MINORITY,
        rules: &["exclusion"],
    },
    Mutant {
        name: "no-minimum-token",
        edits: &[Edit {
            file: "src/wire/script.rs",
            from: "Arg::MinimumToken => cmd.arg(self.minimum_token),",
            times: 1,
            to: "Arg::MinimumToken => cmd.arg(0),",
        }],
        setting: Setting { topology: Standalone, seconds: 15, linger: 200, faults: &["server-set-back"] },
        rules: &["token order", "token unique"],
    },
    Mutant {
        name: "nested-hold-with-its-own-token",
        edits: &[Edit {
            file: "lua/reentrant/acquire.lua",
            from: "local token, refusal = hold_token(current, ",
            times: 1,
            to: "local token, refusal = hold_token(held[2] and current, ",
        }],
        setting: RESENT,
        rules: &["nested token"],
    },
    Mutant {
        name: "one-ttl-for-all-readers",
        edits: &[Edit {
            file: "lua/rwlock/renew.lua",
            from: "if ends < now + ttl then\n",
            times: 1,
            to: "\
if ends < now + ttl then
  for _, each in ipairs(redis.call('HKEYS', KEYS[1])) do
    local rest = string.sub(each, 1, 5) == 'read:' and string.match(redis.call('HGET', KEYS[1], each), ' .*$')
    if rest then redis.call('HSET', KEYS[1], each, now + ttl .. rest) end
  end
",
        }],
        setting: Setting { topology: Standalone, seconds: 35, linger: 8, faults: &["worker-killed"] },
        rules: &["own end"],
    },
    Mutant {
        name: "downgrade-with-a-gap",
        edits: &[Edit {
            file: "lua/rwlock/downgrade.lua",
            from: "    end_write()\n  end\nend\nif not is_reading then",
            times: 1,
            to: "    end_write()\n    admit_waiters()\n  end\nend\nif not is_reading then",
        }],
        setting: RESENT,
        rules: &["exclusion"],
    },
    Mutant {
        name: "waiters-do-not-poll",
        edits: &[Edit {
            file: "src/lease/acquire.rs",
            from: "message = timeout_at(until, mailbox.wait()) => match message {",
            times: 1,
            to: "message = timeout_at(until + Duration::from_secs(3600), mailbox.wait()) => match message {",
        }],
        setting: Setting { topology: Standalone, seconds: 15, linger: 6, faults: &["worker-killed"] },
        rules: &["waiting", "left behind"],
    },
    Mutant {
        name: "dead-waiters-count-as-alive",
        edits: &[
            with_dead_waiters("lua/mutex/acquire.lua", 2),
            with_dead_waiters("lua/mutex/release.lua", 1),
            with_dead_waiters("lua/reentrant/acquire.lua", 2),
            with_dead_waiters("lua/reentrant/release.lua", 1),
            with_dead_waiters("lua/rwlock/read_acquire.lua", 2),
            with_dead_waiters("lua/rwlock/write_acquire.lua", 2),
            with_dead_waiters("lua/rwlock/release.lua", 1),
            with_dead_waiters("lua/rwlock/downgrade.lua", 1),
        ],
        // On a cluster, a node cannot notice that a notified waiter is dead either.
        setting: Setting { topology: Cluster, seconds: 45, linger: 6, faults: &["worker-killed"] },
        rules: &["waiting", "left behind"],
    },
    Mutant {
        name: "missing-reply-counts-as-renewed",
        edits: &[Edit {
            file: "src/lease/renewal.rs",
            from: "        } else {\n            LeaseState::Unknown\n        }",
            times: 1,
            to: "        } else {\n            LeaseState::Held\n        }",
        }],
        setting: Setting {
            topology: Standalone,
            seconds: 25,
            linger: 40,
            faults: &["half-open", "server-stopped"],
        },
        rules: &["exclusion", "backing", "release"],
    },
    Mutant {
        name: "dropped-guards-not-released",
        edits: &[Edit {
            file: "src/lease/owned_lease.rs",
            from: "        if !self.is_disarmed() {\n            self.expect_late_notifications();\n        }\n        if !self.is_disarmed() && !has_nothing_to_undo {",
            times: 1,
            to: "        if !self.is_disarmed() && self.lease.is_some() {",
        }],
        setting: RESENT,
        rules: &["waiting"],
    },
    Mutant {
        name: "claim-from-its-message",
        edits: &[Edit {
            file: "src/lease/acquire.rs",
            from: "let granted = sample.earliest(time, attempt.options.drift, now)?;",
            times: 1,
            to: "let granted = sample.earliest(time, attempt.options.drift, now).map(|_| now)?;",
        }],
        setting: Setting { topology: Standalone, seconds: 45, linger: 200, faults: &["worker-stopped"] },
        rules: &["deadline", "exclusion"],
    },
    Mutant {
        name: "deadline-not-checked",
        edits: &[Edit {
            file: "src/lease/lease.rs",
            from: "self.0.deadline.has_passed().then(",
            times: 1,
            to: "self.0.deadline.get().is_none().then(",
        }],
        setting: LINGERING,
        rules: &["deadline"],
    },
    Mutant {
        name: "lost-counts-as-unknown",
        edits: &[Edit {
            file: "src/lease/renewal.rs",
            from: "            LeaseState::Lost\n        } else {",
            times: 1,
            to: "            LeaseState::Unknown\n        } else {",
        }],
        setting: FORGOTTEN,
        rules: &["bounded loss"],
    },
    Mutant {
        name: "never-renewed",
        edits: &[Edit {
            file: "src/lease/keeper.rs",
            from: "            Renewal::Automatic => Some(lease.counts_from() +",
            times: 1,
            to: "            Renewal::Automatic => Some(lease.until() +",
        }],
        setting: LINGERING,
        rules: &["false loss"],
    },
    Mutant {
        name: "losses-not-reported",
        edits: &[Edit {
            file: "src/lease/lease.rs",
            from: "    pub async fn lost(&self) -> LeaseEnd {\n",
            times: 1,
            to: "    pub async fn lost(&self) -> LeaseEnd {\n        std::future::pending::<()>().await;\n",
        }],
        setting: LINGERING,
        rules: &["late report"],
    },
    Mutant {
        name: "missing-reply-counts-as-released",
        edits: &[
            Edit {
                file: "src/lease/release.rs",
                from: "(ReleaseTally::new(), TRIES)",
                times: 1,
                to: "(ReleaseTally::new(), TRIES / TRIES)",
            },
            Edit {
                file: "src/lease/release.rs",
                from: "                _ => Err(failure.with_effect_if(!tally.unanswered.is_empty())),\n            };",
                times: 1,
                to: "                _ => {\n                    let _silent = failure;\n                    Ok(ReleaseOutcome::Released)\n                }\n            };",
            },
        ],
        setting: Setting { topology: Standalone, seconds: 30, linger: 200, faults: &["client-pause"] },
        rules: &["release"],
    },
    Mutant {
        name: "all-nodes-must-renew",
        edits: &[Edit {
            file: "src/lease/renewal.rs",
            from: "        if self.positives >= nodes.deployment.majority() {",
            times: 1,
            to: "        if self.positives >= nodes.deployment.nodes {",
        }],
        setting: OUTLASTED,
        rules: &["false loss"],
    },
    Mutant {
        name: "all-nodes-must-grant",
        edits: &[Edit {
            file: "src/lease/acquire_round.rs",
            from: "            majority: nodes.deployment.majority(),",
            times: 1,
            to: "            majority: nodes.deployment.nodes,",
        }],
        setting: OUTLASTED,
        rules: &["decision"],
    },
    Mutant {
        name: "lost-with-its-master-counts-as-unknown",
        edits: &[
            Edit {
                file: "src/lease/renewal.rs",
                from: "            LeaseState::Lost\n        } else {",
                times: 1,
                to: "            LeaseState::Unknown\n        } else {",
            },
            Edit {
                // Otherwise the mistake would be repaired: after an unknown reply, a renewal
                // acquires a free lock again.
                file: "src/lease/renewal.rs",
                from: "let is_degraded = tally.state(",
                times: 1,
                to: "let is_degraded = false && tally.state(",
            },
        ],
        setting: Setting { topology: Cluster, seconds: 90, linger: 6, faults: &["failover"] },
        rules: &["bounded loss"],
    },
    Mutant {
        name: "nested-hold-not-counted",
        edits: &[Edit {
            file: "lua/reentrant/acquire.lua",
            from: "redis.call('HINCRBY', KEYS[1], owner, 1)",
            times: 1,
            to: "redis.call('HINCRBY', KEYS[1], owner, 0)",
        }],
        setting: RESENT,
        rules: &["count"],
    },
    Mutant {
        name: "readers-tokens-older-than-the-writer",
        edits: &[Edit {
            file: "lua/rwlock/read_acquire.lua",
            from: "  redis.call('PEXPIRE', KEYS[1], ttl_ms)\n  return token\n",
            times: 1,
            to: "  redis.call('PEXPIRE', KEYS[1], ttl_ms)\n  return token - 1\n",
        }],
        setting: RESENT,
        rules: &["token order"],
    },
    Mutant {
        name: "counters-kept-too-long",
        edits: &[Edit {
            file: "lua/mutex/acquire.lua",
            from: "token_ttl_ms = '3600000'",
            times: 1,
            to: "token_ttl_ms = '36000000'",
        }],
        setting: RESENT,
        rules: &["left behind"],
    },
    Mutant {
        name: "resource-accepts-every-token",
        edits: &[Edit {
            file: "lua/fenced/set.lua",
            from: "if tonumber(token) < largest then return 0 end\n",
            times: 1,
            to: "",
        }],
        setting: LINGERING,
        rules: &["fenced resource"],
    },
];
