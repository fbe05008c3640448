BEGIN TRANSACTION;
CREATE TABLE "_sqlite_migrations" (
   "id" INTEGER PRIMARY KEY,
   "migration_set" TEXT,
   "name" TEXT,
   "applied_at" TEXT
);
INSERT INTO "_sqlite_migrations" VALUES(1,'plantune','m001_tables','2026-11-20 09:31:15.127462+00:00');
CREATE TABLE "environments" (
    "key" TEXT,
    "arch" TEXT,
    "device" TEXT,
    "torch" TEXT,
    "plantune" TEXT,
    "system" TEXT,
    "json" TEXT,
    "created_at" TEXT,
    "sha256" TEXT,
    PRIMARY KEY (key)
);
INSERT INTO "environments" VALUES('863c5a54ec6c2626f52fc322c85d2d486025ce82828725134cb912d89634edac','cpu','A CPU','2.13.0','0.1.0','Linux x86_64','{"arch":"cpu","compiler":"g++","device":"A CPU","device_digest":"0000000000000000","plantune":"0.1.0","system":"Linux x86_64","threads":2,"torch":"2.13.0"}','2026-11-20T09:31:15.134592+00:00','8dea0cff97de2545cf9118aa793f2021605820e3953a72e66b07ae6dbf2efce5');
CREATE TABLE "leases" (
    "key" TEXT,
    "token" TEXT,
    "pid" TEXT,
    "process_start" TEXT,
    "host" TEXT,
    "boot" TEXT,
    "heartbeat" TEXT,
    PRIMARY KEY (key)
);
CREATE TABLE "meta" (
    "key" TEXT,
    "value" TEXT,
    PRIMARY KEY (key)
);
INSERT INTO "meta" VALUES('plantune_schema','1');
CREATE TABLE "plans" (
    "id" INTEGER,
    "network" TEXT,
    "graph" TEXT,
    "arch" TEXT,
    "batch" INTEGER,
    "dtype" TEXT,
    "mode" TEXT,
    "environment" TEXT,
    "origin" TEXT,
    "status" TEXT,
    "plan" TEXT,
    "median_ms" REAL,
    "baseline" TEXT,
    "baseline_ms" REAL,
    "ratio" REAL,
    "created_at" TEXT,
    "sha256" TEXT,
    PRIMARY KEY (id)
);
INSERT INTO "plans" VALUES(1,'net','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','cpu',8,'float32','infer','863c5a54ec6c2626f52fc322c85d2d486025ce82828725134cb912d89634edac','measured','complete','{"arch":"cpu","batch":8,"choices":[{"config":{"layout":"nhwc","prepack":true},"family":"onednn_conv","nodes":["layers.0/conv2d","layers.0.relu/relu"]},{"config":{"layout":"nchw"},"family":"framework","nodes":["d(layers.0/conv2d)/add_2"]}],"dtype":"float32","evidence":{"baseline":"torchscript","baseline_ms":4,"median_ms":2.5,"ratio":0.625},"format":1,"graph":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","mode":"infer","network":"net","origin":"measured","runner":"program"}',2.5,'torchscript',4.0,0.625,'2026-11-20T09:31:15.134356+00:00','4016f704cd939b664c552bf65d01c451e566e2fabf7e5b6fdd008666ba2ae1c4');
CREATE TABLE "trials" (
    "step" TEXT,
    "candidate" TEXT,
    "environment" TEXT,
    "kind" TEXT,
    "stage" TEXT,
    "reason" TEXT,
    "median_us" REAL,
    "low_us" REAL,
    "high_us" REAL,
    "samples" INTEGER,
    "error" REAL,
    "bound" REAL,
    "deterministic" INTEGER,
    "cache" TEXT,
    "created_at" TEXT,
    "sha256" TEXT,
    PRIMARY KEY (step, candidate, environment)
);
INSERT INTO "trials" VALUES('step','{"config":{"layout":"nhwc","prepack":true},"family":"onednn_conv"}','863c5a54ec6c2626f52fc322c85d2d486025ce82828725134cb912d89634edac','measured',NULL,NULL,12.5,12.0,13.25,40,1.0e-06,2.0e-06,1,'warm','2026-11-20T09:31:15.135068+00:00','8a74384a916ff18a78e6b7f94d695e005bd21cfe20fae6595898e0a9ffaf6b1b');
CREATE UNIQUE INDEX "idx__sqlite_migrations_migration_set_name"
    ON "_sqlite_migrations" ("migration_set", "name");
COMMIT;
